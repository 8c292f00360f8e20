"""Real gloo ranks: calls that only some of them make end in an error that names them, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.memory import UNSENT
from tests.support.bits import Checksums, checksums
from tests.support.models import batch, digest, gradients, optimizer_of, perceptron, train
from tests.support.raised import Raised, raised
from tests.support.ranks import TIMEOUT_S
from tests.support.states import own_state
from tests.support.tiers import rest
from tests.support.world import Ranks, lose_groups

pytestmark = pytest.mark.process

Attached = tuple[DistributedDataParallel, torch.optim.Optimizer, gradwire.Wire]


def _attached(group: dist.ProcessGroup | None = None) -> Attached:
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.05)", process_group=group)
    wire.watching = True
    train(ddp, optimizer, range(3))
    return ddp, optimizer, wire


CALLS: dict[str, Callable[[gradwire.Wire], object]] = {
    "save()": lambda wire: wire.save("nowhere"),  # never used: no rank gets so far
    "load(missing='refuse')": lambda wire: wire.load("nowhere"),
    "flush()": lambda wire: wire.flush(),
    "detach()": lambda wire: wire.detach(),
    "mean_state_dict()": lambda wire: wire.mean_state_dict(),
    "load_state_dict(missing='refuse')": lambda wire: wire.load_state_dict(wire.state_dict()),
    "diagnose()": lambda wire: wire.diagnose(),
}
AGAINST = dict(zip(CALLS, [*CALLS][1:] + [*CALLS][:1], strict=True))
"""Of each call on rank 0, the one on rank 1."""


@dataclass(frozen=True)
class Called:
    """What calls have raised, and a run that has gone on after them."""

    raised: dict[str, Raised]
    digest: str
    step: int


def different_calls() -> Called:
    """Every call on rank 0 against another one on rank 1."""
    ddp, optimizer, wire = _attached()
    calls = {name: other if dist.get_rank() else name for name, other in AGAINST.items()}
    found = {name: raised(partial(CALLS[call], wire)) for name, call in calls.items()}
    train(ddp, optimizer, range(3, 6))
    return Called(found, digest(ddp), wire.report().step)


def test_different_calls_are_named_on_all_ranks_and_training_goes_on(two: Ranks) -> None:
    one, other = two(different_calls)
    for name, against in AGAINST.items():
        for heard in (one.raised[name], other.raised[name]):
            assert heard.kind == "RanksDisagree", name
            assert f"rank 0: {name} at step 3; rank 1: {against} at step 3" in heard.text
            assert heard.after_s < TIMEOUT_S / 2
    assert one.digest == other.digest
    assert one.step == other.step == 6


@dataclass(frozen=True)
class Failed:
    """What a call has raised, and the memory and the gradients around it."""

    raised: Raised
    before: Checksums
    after: Checksums


@dataclass(frozen=True)
class AllFailed:
    """Each call, a step after it, and what is left at the end."""

    calls: dict[str, Failed]
    digest: str
    step: int
    recipe: str


COULD_NOT = {
    "flush": "add what is unsent to its gradients",
    "detach": "add what is unsent to its gradients",
    "switch": "switch",
    "diagnose, before": "diagnose",
    "diagnose, a choice": "diagnose",
}


def fails_on_one_rank() -> AllFailed:
    """All ranks make a call in which rank 1 alone fails, after all have come to it; then training goes on."""
    ddp, optimizer, wire = _attached()
    reducer, none = wire.attached.backward.reducer, Mock(side_effect=MemoryError("none left"))
    remembered = reducer.layout.flat_buffers[0].committed
    harmed: dict[str, tuple[Callable[[], object], Any]] = {
        "flush": (wire.flush, patch.object(wire.attached.source, "adding", none)),
        "detach": (wire.detach, patch.object(reducer, "retired", none)),
        "switch": (partial(wire.switch, "int8"), patch.object(reducer, "successor", none)),
        "diagnose, before": (wire.diagnose, patch.dict(remembered, {UNSENT: Mock(double=none)})),
        "diagnose, a choice": (wire.diagnose, patch("gradwire.kernels.topk.topk_indices", none)),
    }

    def held() -> Checksums:
        return checksums([*own_state(wire)["memory"].values(), *gradients(ddp)])

    found = {}
    for number, (name, (call, harm)) in enumerate(harmed.items()):
        before = held()
        with harm if dist.get_rank() == 1 else nullcontext():
            heard = raised(call)
        found[name] = Failed(heard, before, held())
        train(ddp, optimizer, range(3 + number, 4 + number))
    return AllFailed(found, digest(ddp), wire.report().step, wire.report().recipe)


def test_a_call_that_fails_on_one_rank_fails_on_all_and_changes_nothing(two: Ranks) -> None:
    first, second = two(fails_on_one_rank)
    for name, what in COULD_NOT.items():
        heard, own = first.calls[name], second.calls[name]
        assert str(heard.raised) == f"PeerFailed: rank 1 could not {what}: MemoryError: none left", name
        assert heard.raised.after_s < TIMEOUT_S / 2, "long before the timeout"
        assert str(own.raised) == "MemoryError: none left", "its own cause"
        assert heard.after == heard.before, name
        assert own.after == own.before, name
    assert first.digest == second.digest
    assert first.step == second.step == 3 + len(COULD_NOT), "training goes on"
    assert first.recipe.startswith("topk"), "with the recipe that it had"


@dataclass(frozen=True)
class Trained:
    """What a call or a step has raised, and what the next step of all ranks; digests around them."""

    raised: Raised
    again: Raised
    before: str
    after: str


def call_against_step(name: str) -> Trained:
    """A call on rank 0, such as behind `if os.path.exists(file)`, while rank 1 trains on."""
    ddp, _optimizer, wire = _attached()
    inputs, targets = batch(3)

    def step() -> None:
        nn.functional.mse_loss(ddp(inputs), targets).backward()

    before = digest(ddp)
    heard = raised(step if dist.get_rank() else partial(CALLS[name], wire))
    found = Trained(heard, raised(step), before, digest(ddp))
    lose_groups()
    return found


@pytest.mark.parametrize("call", rest(["load_state_dict(missing='refuse')", "flush()"], but=["flush()"]))
def test_a_call_on_one_rank_while_another_trains_is_named_on_both(two: Ranks, call: str) -> None:
    for found in two(call_against_step, call):
        assert found.raised.kind == "RanksDisagree"
        assert f"rank 0: {call} at step 3; rank 1: a training step" in found.raised.text
        assert found.raised.after_s < TIMEOUT_S / 2, "long before the timeout"
        assert found.again.kind in ("RanksDisagree", "GradwireError"), "the order of collectives is lost"
        assert "tart all ranks again" in found.again.text
        assert found.after == found.before


def call_against_nothing() -> Raised:
    """A call that rank 1 does not make, on a group with a short timeout."""
    *_, wire = _attached(dist.new_group([0, 1], timeout=timedelta(seconds=2)))
    heard = raised(wire.flush) if dist.get_rank() == 0 else Raised()
    dist.barrier()
    return heard


def test_a_call_that_a_rank_never_makes_ends_at_the_timeout_and_is_named(two: Ranks) -> None:
    heard, _ = two(call_against_nothing)
    assert heard.kind == "TransportError"
    assert "flush() at step 3 waited" in heard.text
    assert "for rank 1, which made no call" in heard.text
    assert 2.0 < heard.after_s < TIMEOUT_S / 2
