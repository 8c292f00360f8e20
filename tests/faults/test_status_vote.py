"""Real gloo ranks: one rank's exception or NaN reaches all ranks in the same step, and training goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.codec.select.topk import TopK
from gradwire.comm.base import SHORT_BYTES
from gradwire.comm.checksums import SealedLayout
from tests.support.bits import Checksums, checksums
from tests.support.models import batch, digest, gradients, optimizer_of, perceptron, train
from tests.support.raised import Raised, raised
from tests.support.states import own_state
from tests.support.tiers import cases, rest
from tests.support.world import Ranks, lose_groups

pytestmark = pytest.mark.process

RECIPE = "topk(ratio=0.05)"
DAMAGED = ("topk(ratio=0.2)", "dense", "gcomp", "int8")
UNLUCKY = 1


class Accident(Exception):
    """What a codec may raise."""


@dataclass(frozen=True)
class Held:
    """What a step that counts would change."""

    memory: Checksums
    step: int
    digest: str


@dataclass(frozen=True)
class Survived:
    """A backward pass in which something befalls a rank, what was held around it, and training afterwards."""

    raised: Raised
    before: Held
    after: Held
    losses: list[float]
    digest: str
    checksum_bytes: float


def _backward(ddp: DistributedDataParallel, step: int, factor: float = 1.0) -> Raised:
    """By one forward and backward pass."""
    inputs, targets = batch(step)
    ddp.zero_grad()
    return raised(lambda: (nn.functional.mse_loss(ddp(inputs), targets) * factor).backward())


def _memory(wire: gradwire.Wire) -> Checksums:
    return checksums(own_state(wire)["memory"].values())


def _survived(harm: AbstractContextManager[Any], recipe: str, checks: bool, **options: Any) -> Survived:
    ddp = DistributedDataParallel(perceptron(), **options)
    optimizer = optimizer_of(ddp, lr=0.2)
    wire = gradwire.attach(ddp, optimizer, recipe, checksums=checks)

    def held() -> Held:
        return Held(_memory(wire), wire.report().step, digest(ddp))

    losses = train(ddp, optimizer, range(5))
    before = held()
    with harm if dist.get_rank() == UNLUCKY else nullcontext():
        heard = _backward(ddp, 5)
    after = held()
    losses += train(ddp, optimizer, range(5, 60))
    return Survived(heard, before, after, losses, digest(ddp), wire.report().checksum_bytes)


def _check_that_it_went_on(found: list[Survived]) -> None:
    for each in found:
        assert each.after == each.before
        assert each.losses[-1] < 0.5 * each.losses[5]
    assert len({each.digest for each in found}) == 1


def accident(kind: type[BaseException] = Accident, option: str = "") -> Survived:
    """An exception in a codec of one rank, under DDP with this option."""
    harm = patch.object(TopK, "select", Mock(side_effect=kind("out of luck")))
    return _survived(harm, RECIPE, False, **({option: True} if option else {}))


ACCIDENTS = [
    *((Accident, option) for option in ("", "static_graph", "find_unused_parameters")),
    (SystemExit, ""),
]
befallen = pytest.mark.parametrize(("kind", "option"), cases(ACCIDENTS, but=ACCIDENTS[:1]))


@befallen
def test_backward_raises_the_accident_itself_where_it_happened(
    three: Ranks, kind: type[BaseException], option: str
) -> None:
    heard = three(accident, kind, option)[UNLUCKY].raised
    assert str(heard) == f"{kind.__name__}: out of luck"
    assert heard.notes == (f"gradwire: step 5, rank {UNLUCKY}, encode of flat buffer 0 unit 0",)


@befallen
def test_backward_raises_on_the_other_ranks_and_names_the_one(
    three: Ranks, kind: type[BaseException], option: str
) -> None:
    for rank, found in enumerate(three(accident, kind, option)):
        if rank != UNLUCKY:
            assert found.raised.kind == "PeerFailed"
            assert f"rank {UNLUCKY} failed" in found.raised.text


@befallen
def test_after_an_accident_everything_is_as_before_and_training_goes_on(
    three: Ranks, kind: type[BaseException], option: str
) -> None:
    _check_that_it_went_on(three(accident, kind, option))


def damaged(recipe: str) -> Survived:
    """A flipped bit in each long message that one rank receives in a step."""
    honest = SealedLayout.open

    def struck(how: SealedLayout, message: Tensor, *arguments: Any) -> tuple[bool, bool]:
        message[0] ^= how.payload_bytes > SHORT_BYTES
        return honest(how, message, *arguments)

    return _survived(patch.object(SealedLayout, "open", struck), recipe, True, bucket_cap_mb=0.01)


@pytest.mark.parametrize("recipe", rest(DAMAGED, but=DAMAGED[:1]))
def test_damaged_bytes_are_noticed_on_all_ranks_in_their_step_and_training_goes_on(
    three: Ranks, recipe: str
) -> None:
    found = three(damaged, recipe)
    own = found[UNLUCKY].raised
    assert own.kind == "WireError"
    assert f"rank {UNLUCKY} received damaged bytes from rank" in own.text
    assert f"gradwire: step 5, rank {UNLUCKY}, " in own.notes[0]
    for each in found[:UNLUCKY] + found[UNLUCKY + 1 :]:
        assert each.raised.kind == "PeerFailed"
        assert f"rank {UNLUCKY}" in each.raised.text
    assert all(each.checksum_bytes > 0.0 for each in found)
    _check_that_it_went_on(found)


@dataclass(frozen=True)
class Poisoned:
    """A step with a NaN in one rank's loss, and the parameters of a run with it and of one without."""

    raised: Raised
    finite_gradients: int
    memory_before: Checksums
    memory_after: Checksums
    skipped: int
    digest: str
    digest_without: str


def not_finite(recipe: str) -> Poisoned:
    """The step counts on no rank."""

    def run(poisons: bool) -> tuple[list[Any], str]:
        ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
        optimizer, seen = optimizer_of(ddp), list[Any]()
        wire = gradwire.attach(ddp, optimizer, recipe)
        train(ddp, optimizer, range(5))
        if poisons:
            before = _memory(wire)
            heard = _backward(ddp, 99, torch.nan if dist.get_rank() == UNLUCKY else 1.0)
            finite = sum(int(each.isfinite().sum()) for each in gradients(ddp))
            seen = [heard, finite, before, _memory(wire), wire.report().skipped_steps]
        train(ddp, optimizer, range(5, 20))
        return seen, digest(ddp)

    seen, with_it = run(True)
    return Poisoned(*seen, with_it, run(False)[1])


@pytest.mark.parametrize("recipe", rest([RECIPE, "covap(interval=4)"], but=[RECIPE]))
def test_a_nan_on_one_rank_makes_every_gradient_nan_and_is_forgotten(three: Ranks, recipe: str) -> None:
    found = three(not_finite, recipe)
    for each in found:
        assert str(each.raised) == ""
        assert each.finite_gradients == 0
        assert each.memory_after == each.memory_before
        assert each.skipped == 1
        assert each.digest == each.digest_without
    assert len({each.digest for each in found}) == 1


def broken_off() -> list[str]:
    """What is raised by a backward pass that the user's own code interrupts on all ranks, and by the next."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    gradwire.attach(ddp, optimizer, RECIPE)
    train(ddp, optimizer, range(3))

    def trip(_gradient: Any) -> None:
        raise Accident("in a hook of the user's")

    first = next(ddp.parameters()).register_hook(trip)
    found = [_backward(ddp, 3).kind]
    first.remove()
    found.append(_backward(ddp, 4).kind)
    lose_groups()
    return found


def test_after_a_backward_pass_that_broke_off_the_next_one_says_so(three: Ranks) -> None:
    assert three(broken_off) == [["Accident", "RuntimeError"]] * 3


def one_sided() -> str:
    """By `attach` on ranks of which one alone asks for checksums."""
    ddp = DistributedDataParallel(perceptron())
    return str(raised(partial(gradwire.attach, ddp, None, RECIPE, checksums=dist.get_rank() == UNLUCKY)))


def test_checksums_on_some_ranks_only_are_refused_on_all(three: Ranks) -> None:
    for heard in three(one_sided):
        assert heard.startswith("RanksDisagree: ranks disagree on checksums: rank 0: False")
