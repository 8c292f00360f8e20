"""Real gloo ranks: FSDP2's own traffic is uncoded until all ranks have its kernels."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradwire
from gradwire.sources.fsdp import traffic
from tests.process.fsdp_models import bits, loss_of, sharded, whole
from tests.support.called import told
from tests.support.lacking import NEVER, lacks_kernels
from tests.support.models import optimizer_of
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


UNTIL = " (uncoded until its kernels are compiled)"


@dataclass(frozen=True)
class Seen:
    """What a wire tells before a pass."""

    settled: bool
    recipe: str
    gather: str | None
    is_uncoded: bool
    memory: tuple[int, int]
    """Bytes of what is unsent, and of gathered parameters that are held."""


@dataclass(frozen=True)
class Run:
    """A run, and its digest beside that of a run whose recipe was changed by hand."""

    seen: list[Seen]
    digest: str
    by_hand: str
    said: bool


def _seen(wire: gradwire.Wire) -> Seen:
    report = wire.report()
    memory = report.memory_bytes, report.as_dict()["held_bytes"]
    return Seen(wire.settled, report.recipe, report.gather, report.ratio > 0.9, memory)


def _two_passes_a_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    passes: range,
    before: Mapping[int, Callable[[], object]],
) -> None:
    for number in passes:
        if number in before:
            before[number]()
        if number % 2 == 0:
            optimizer.zero_grad()
        loss_of(model, number).backward()
        if number % 2:
            optimizer.step()


def changes_over(gather: str) -> Run:
    """Rank 1 has its kernels in the fifth pass, the first of two of a step."""
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if gather == "exact" else {}
    model, other = sharded(**policy), sharded(**policy)
    optimizer, other_optimizer = optimizer_of(model), optimizer_of(other)
    with lacks_kernels(1, 4), told(logging.INFO) as lines:
        wire = gradwire.attach(model, optimizer, "int4", gather=gather)
    seen: list[Seen] = []
    looks = dict.fromkeys((2, 5, 8), lambda: seen.append(_seen(wire)))
    _two_passes_a_step(model, optimizer, range(10), looks)
    by_hand = gradwire.attach(other, other_optimizer, "dense")
    switches = {5: lambda: by_hand.switch("int4", gather)}
    _two_passes_a_step(other, other_optimizer, range(10), switches)
    said = any("uncoded until its kernels are compiled, which another process does" in each for each in lines)
    return Run(seen, bits(whole(model)), bits(whole(other)), said)


@pytest.mark.parametrize("gather", rest(["int8", "exact"], but=["int8"]))
def test_what_was_asked_for_begins_on_all_ranks_in_the_same_pass(two: Ranks, gather: str) -> None:
    runs = two(changes_over, gather)
    assert [each.said for each in runs] == [True, False], "rank 0 says so"
    for found in runs:
        first, due, last = found.seen
        memory = last.memory  # it is allocated from the beginning
        awaited = "int4 (dense until its kernels are compiled)", f"{gather}{UNTIL}"
        assert first == due == Seen(False, *awaited, True, memory)
        assert last == Seen(True, "int4", gather, False, memory)
        assert memory[0] > 0
        assert (memory[1] > 0) == (gather == "exact")
        assert found.digest == found.by_hand, "bit for bit"


def resumes() -> tuple[list[str], str, str]:
    """A state that was saved before there were kernels, in a run that still awaits its own. There is no room
    for a second memory.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, again = sharded(mp_policy=policy), sharded(mp_policy=policy, seed=1)
    optimizer, optimizer_again = optimizer_of(model), optimizer_of(again)
    with lacks_kernels(1, NEVER):
        wire = gradwire.attach(model, optimizer, "int4", gather="exact")
        wire_again = gradwire.attach(again, optimizer_again, "int4", gather="exact")
    _two_passes_a_step(model, optimizer, range(4), {})
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    wire_again.load_state_dict(wire.state_dict())
    with patch.multiple(traffic, Unsent=Mock(side_effect=MemoryError), Held=Mock(side_effect=MemoryError)):
        wire.switch("int4")
    for each, steps in ((model, optimizer), (again, optimizer_again)):
        _two_passes_a_step(each, steps, range(4, 8), {})
    return [each.report().recipe for each in (wire, wire_again)], bits(whole(model)), bits(whole(again))


@pytest.mark.rest
def test_a_state_that_is_loaded_and_a_recipe_that_is_switched_to_begin_at_once(two: Ranks) -> None:
    for recipes, through, resumed in two(resumes):
        assert recipes == ["int4", "int4"]
        assert through == resumed


def inside_replicas() -> list[str | None]:
    """Coding after each step of gathers inside one replica of two ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "ranks"))
    model = sharded(over=mesh["ranks"])
    optimizer = optimizer_of(model)
    with lacks_kernels(1, 2):
        wire = gradwire.attach(model, optimizer, "int8", replicas=mesh["replicas"], gather="int8")
    found = []
    for number in (0, 2, 4, 6):
        _two_passes_a_step(model, optimizer, range(number, number + 2), {})
        found.append(wire.report().gather)
    return found


@pytest.mark.rest
def test_gathers_inside_replicas_are_uncoded_until_then(two: Ranks) -> None:
    for found in two(inside_replicas):
        assert found == [f"int8{UNTIL}", "int8", "int8", "int8"]
