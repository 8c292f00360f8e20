"""Real gloo ranks: FSDP2's own gathers and scatters, carried by gradwire, beside stock FSDP2."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from logging.handlers import BufferingHandler
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import gradwire
from gradwire.comm.groups import lent
from gradwire.errors import PeerFailed
from gradwire.sources.fsdp.traffic import Traffic
from tests.process.fsdp_models import (
    BF16,
    LOOPS,
    NODES,
    WIDTH,
    Layered,
    Loop,
    Tied,
    adam,
    bits,
    carried,
    evaluated,
    loss_of,
    mesh,
    plain,
    refusal,
    reshard,
    sharded,
    stock,
    train,
    whole,
    whole_of,
)
from tests.support.models import SHAPE
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process


class Columns(nn.Module):
    """Parameters that come out even in both dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(SHAPE[0], 64), nn.Linear(64, 64)])
        self.last = nn.Linear(64, SHAPE[-1])

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return self.last(inputs)


def by_columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


def divided(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """FSDP2 divides by another number than the world."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(3.0)
            each.set_force_sum_reduction_for_comms(True)  # stock FSDP2 over gloo needs it for any factor
    return train(model, optimizer, range(6))


SUITS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "plain": (plain, {}),
    **{name: (loop, {}) for name, loop in LOOPS.items()},
    "divided": (divided, {}),
    "kept gathered": (plain, {"reshard_after_forward": False}),
    "gathered again over two": (plain, {"reshard_after_forward": 2}),
    "recomputing": (plain, {"make": partial(Layered, again=False)}),
    "recomputing, reentrant": (plain, {"make": partial(Layered, again=True)}),
    "compiled": (plain, {"compiled": True}),
    "frozen": (plain, {"frozen": ("first", "blocks.0")}),
    "tied": (plain, {"make": Tied}),
    "offload": (plain, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "bfloat16": (plain, {"mp_policy": BF16}),
    "bfloat16, added up in float32": (
        plain,
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ),
    "grouped": (plain, {"groups": True}),
    "by columns": (plain, {"make": Columns, "shard_placement_fn": by_columns}),
}
"""Ways to train and to shard."""
SOON = ("plain", "sent_twice", "branching", "recomputing", "bfloat16", "grouped")

DENSE = {
    "plain": 6,
    "clipped": 6,
    "accumulated": 4,
    "sent_twice": 5,  # before an optimizer has stepped, no scatter is known to wait for it
    "branching": 6,
    "divided": 6,
    "prefetched": 6,
    "kept gathered": 6,
    "grouped": 6,
    "bfloat16": 6,
}
"""How many steps an optimizer makes."""


@pytest.mark.parametrize("name", rest(DENSE, but=["plain", "accumulated", "bfloat16"]))
def test_dense_is_stock_fsdp2_bit_for_bit(two: Ranks, name: str) -> None:
    loop, how = SUITS[name]
    for found, other in zip(two(carried, "dense", None, loop, **how), two(stock, loop, **how), strict=True):
        assert found.masters == other.masters
        assert found.losses == other.losses
        assert found.step == DENSE[name]
        is_half = name == "bfloat16"
        assert found.gathered == ["bfloat16" if is_half else "float32"]
        # Since torch 2.15 gradients are scattered in the parameters' own type, unless reduce_dtype= is given.
        assert found.scattered == ["bfloat16" if is_half and torch.__version__ < (2, 15) else "float32"]
        assert found.memory_bytes == 0
        if name == "grouped":
            assert found.modules == 4


def test_dense_counts_the_bytes_that_gloo_sends(two: Ranks) -> None:
    for found in two(carried, "dense", None):
        half = 4 * found.numel / 2
        # Uneven rows are filled up: a few of 65 here. The root is gathered once, its blocks twice.
        assert half < found.gather_bytes < 2 * half * 1.1
        assert 2 * half <= found.scatter_bytes < 2 * half * 1.1
        assert found.dense_bytes == found.gather_bytes + found.scatter_bytes / 2
        both = found.gather_bytes + found.scatter_bytes
        assert found.told_bytes == [both, found.gather_bytes, found.scatter_bytes]
        assert "gathered as" in found.text


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("name", rest(SUITS, but=SOON))
def test_it_trains_like_stock_fsdp2(two: Ranks, name: str, recipe: str) -> None:
    loop, how = SUITS[name]
    found, others = two(carried, recipe, "int8", loop, **how), two(stock, loop, **how)
    assert found[0].masters == found[1].masters
    for each, other in zip(found, others, strict=True):
        assert each.losses != other.losses
        # Of six steps of AdamW, in which a value of either sign may move by the learning rate.
        assert abs(each.losses[-1] - other.losses[-1]) < 0.1 * other.losses[0]
        assert each.losses[-1] < each.losses[0]
        if name == "grouped":
            assert (each.modules, each.gathered, each.scattered) == (4, ["int8"], [recipe])


@pytest.mark.parametrize("recipe", ["int4", pytest.param("int8", marks=pytest.mark.rest)])
@pytest.mark.parametrize("name", rest(["plain", "branching", "prefetched", "bfloat16"], but=["prefetched"]))
def test_it_trains_like_stock_fsdp2_on_nodes(four: Ranks, name: str, recipe: str) -> None:
    loop, how = SUITS[name]
    found = four(carried, recipe, "int8", loop, nodes=NODES["in a row"], **how)
    assert len({each.masters for each in found}) == 1
    for each, other in zip(found, four(stock, loop, **how), strict=True):
        assert each.losses != other.losses
        assert abs(each.losses[-1] - other.losses[-1]) < 0.1 * other.losses[0]


@pytest.mark.rest
@pytest.mark.parametrize("name", ["recomputing, reentrant", "sent_twice"])
def test_bytes_are_counted_per_pass_however_often_a_pass_is_entered(two: Ranks, name: str) -> None:
    loop, how = SUITS[name]
    found = two(carried, "int8", "int8", loop, **how)
    for each, other in zip(found, two(carried, "int8", "int8", plain), strict=True):
        assert each.scatter_bytes == other.scatter_bytes


def normed(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The norms of gradients, and not the losses."""
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norms.append(float(whole_of(nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
    return norms


@pytest.mark.parametrize("recipe", ["int4", pytest.param("int8", marks=pytest.mark.rest)])
@pytest.mark.parametrize("name", ["bfloat16", pytest.param("plain", marks=pytest.mark.rest)])
def test_norms_of_gradients_are_those_of_stock_fsdp2(two: Ranks, name: str, recipe: str) -> None:
    _, how = SUITS[name]
    found, others = two(carried, recipe, "int8", normed, **how), two(stock, normed, **how)
    for norms, theirs in ((each.losses, other.losses) for each, other in zip(found, others, strict=True)):
        # int4 is off by a tenth of the norm of normal numbers, at right angles to them for the most part.
        assert norms[0] == pytest.approx(theirs[0], rel=0.05)
        assert all(norm > 0.1 * theirs[0] for norm in norms)


# -- what is refused


def refused() -> dict[str, str]:
    """Each in its words."""
    rank, world = dist.get_rank(), dist.get_world_size()
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("nodes", "ranks"))
    part = Layered()
    fully_shard(part.blocks[0], mesh=mesh())
    allocating = sharded()
    allocating.set_allocate_memory_from_process_group_for_comm(True)
    twice = sharded()
    gradwire.attach(twice, None, "dense")
    mixed = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()), mesh=mesh())
    ignored = Layered()
    fully_shard(ignored, mesh=mesh(), ignored_params={ignored.last.weight})
    between = {"replicas": grid["nodes"]}

    def trial(model: nn.Module, *arguments: Any, **options: Any) -> str:
        return refusal(lambda: gradwire.attach(model, *arguments, **options))

    return {
        "auto": trial(sharded()),
        "topk": trial(sharded(), None, "topk"),
        "collective": trial(sharded(), None, "int8(collective='all_gather')"),
        "grid": trial(sharded(over=grid), None, "dense"),
        "part": trial(part, None, "dense"),
        "allocating": trial(allocating, None, "dense"),
        "twice": trial(twice, None, "dense"),
        "mixed": trial(mixed, None, "dense", gather="int8"),
        "mixed, as it is": trial(mixed, None, "dense"),
        "ignored": trial(ignored, None, "dense"),
        "gather": trial(sharded(), None, "dense", gather="int4"),
        "gather, inside nodes": trial(sharded(over=grid["ranks"]), None, "int8", gather="fp8", **between),
        "inside": trial(sharded(), None, "dense", inside="int8"),
        "inside, remembers": trial(sharded(over=grid["ranks"]), None, "int8", inside="int4", **between),
        "policy": trial(sharded(), None, "int8", policy={"*": "dense"}),
        "checksums": trial(sharded(), None, "int8", checksums=True),
        "process group": trial(sharded(), None, "int8", process_group=dist.group.WORLD),
        "optimizer": trial(sharded(), adam(Layered()), "int8"),
        "nodes": trial(sharded(), None, "int8", nodes=[[0], list(range(1, world))]),
        "ranks": trial(sharded(), None, "int8" if rank else "int4"),
        "seed": trial(sharded(), None, "int8", seed=rank),
        "on one rank": trial(sharded(), None, "int8" if rank else "topk"),
        "plain module": trial(Layered(), None, "int8", replicas=dist.group.WORLD, gather="int8"),
    }


REFUSED = {
    "auto": "auto does not choose among them yet",
    "topk": "choose dense, bf16, fp8, int8 or int4",
    "collective": "choose dense, bf16, fp8, int8 or int4",
    "grid": "pass the one between nodes as replicas=",
    "part": "call it on the whole model",
    "allocating": "set_allocate_memory_from_process_group_for_comm",
    "twice": "this model is carried already, by its traffic of FSDP2",
    "mixed": "gathered as raw bytes",
    "ignored": "leave ignored_params out",
    "gather": "gather='int4' is none of None, 'bf16', 'int8' and 'exact'",
    "gather, inside nodes": "gather='fp8'",
    "inside": "inside= goes with replicas=",
    "inside, remembers": "without feedback",
    "policy": "policy= has no meaning",
    "checksums": "checksums= has no meaning",
    "process group": "process_group= has no meaning",
    "optimizer": "has no parameter of this model",
    "nodes": "nodes differ in size",
    "ranks": "ranks disagree on recipe",
    "seed": "ranks disagree on seed",
    "on one rank": "is not for FSDP2's own scatters",
    "plain module": "inside= and gather= are for modules under fully_shard",
}


def test_what_cannot_be_is_refused_with_what_to_do(four: Ranks) -> None:
    for found in four(refused):
        assert [name for name in REFUSED if REFUSED[name] not in found[name]] == [], found
        assert [name for name in found if name not in REFUSED and found[name]] == [], found


@dataclass(frozen=True)
class Refused:
    """What is raised, and how many groups stay lent."""

    said: str
    lent: int


def refused_with_groups() -> tuple[Refused, Refused]:
    """For its arguments, and as a rank has no room. The mesh's own group carries no tensors on the CPU."""

    def fails(*_: Any) -> Any:
        raise MemoryError("no room")

    lacks = patch.object(Traffic, "make_room", fails) if dist.get_rank() == 1 else nullcontext()
    with patch("gradwire.comm.groups.carries_cpu", return_value=False):
        said = refusal(lambda: gradwire.attach(sharded(), None, "int8", checksums=True))
        arguments = Refused(said, len(lent()))
        with lacks:
            attach = partial(gradwire.attach, sharded(), None, "int4", nodes=NODES["in a row"])
            said = refusal(attach, MemoryError, PeerFailed)
        return arguments, Refused(said, len(lent()))


def test_a_model_that_is_refused_gives_its_groups_back(four: Ranks) -> None:
    for arguments, room in four(refused_with_groups):
        assert "checksums= has no meaning" in arguments.said
        assert "no room" in room.said
        assert arguments.lent == room.lent == 0


@dataclass(frozen=True)
class Lent:
    """How many groups are lent to a model, and after it; and how many of them are new."""

    during: int
    after: int
    new: int


def agrees_elsewhere() -> list[Lent]:
    """A model that goes, and one that is detached. The mesh's own group carries no tensors on the CPU."""
    found = []
    with patch("gradwire.comm.groups.carries_cpu", return_value=False):
        for detaches in (False, True):
            model = sharded()
            optimizer, groups = adam(model), len(dist.distributed_c10d._world.pg_names)
            wire = gradwire.attach(model, optimizer, "int8")
            train(model, optimizer, range(1))
            during = len(lent())
            if detaches:
                wire.detach()
            else:
                del model, optimizer, wire
                gc.collect()
            found.append(Lent(during, len(lent()), len(dist.distributed_c10d._world.pg_names) - groups))
    return found


def test_the_group_over_which_ranks_agree_goes_back_with_its_model(two: Ranks) -> None:
    for gone, detached in two(agrees_elsewhere):
        assert (gone.during, gone.after) == (detached.during, detached.after) == (1, 0)
        assert detached.new == 0, "the second model has the first one's"


# -- nodes


def comes_by_nodes() -> list[tuple[int, str]]:
    """How many groups there are more than at first, and the report: before anything is coded, after each of
    three recipes, and with another model."""
    groups, found = len(dist.distributed_c10d._world.pg_names), []
    model = sharded()
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, "dense", nodes=NODES["in a row"])

    def note(wire: gradwire.Wire) -> None:
        found.append((len(dist.distributed_c10d._world.pg_names) - groups, str(wire.report())))

    note(wire)
    for recipe in ("int8", "dense", "int4"):
        wire.switch(recipe)
        train(model, optimizer, range(1))
        note(wire)
    wire.detach()
    note(gradwire.attach(sharded(), None, "int8", nodes=NODES["in a row"]))
    return found


def test_groups_of_nodes_are_made_when_they_are_needed_and_used_again(four: Ranks) -> None:
    for found in four(comes_by_nodes):
        assert [groups for groups, _ in found] == [0, 2, 2, 2, 2]
        assert all("in nodes" in text for _, text in found[1:4])


@dataclass(frozen=True)
class Said:
    """Warnings, and what a report says."""

    warned: list[str]
    why_flat: str
    text: str


def on_unequal_nodes() -> dict[str, Said]:
    """By recipe, where the launcher has put three ranks on a node and one on another."""
    log, logger = BufferingHandler(100), logging.getLogger("gradwire")
    logger.addHandler(log)

    def said(wire: gradwire.Wire) -> Said:
        report, records = wire.report(), list(log.buffer)
        log.buffer.clear()
        warned = [each.getMessage() for each in records if each.levelno >= logging.WARNING]
        return Said(warned, report.as_dict()["why_flat"], " ".join(str(report).split()))

    with patch.dict(os.environ, LOCAL_WORLD_SIZE="3" if dist.get_rank() < 3 else "1"):
        found = {"int8": said(gradwire.attach(sharded(), None, "int8"))}
        found["asked for"] = said(gradwire.attach(sharded(), None, "int8", nodes=None))
        wire = gradwire.attach(sharded(), None, "dense")
        found["dense"] = said(wire)
        wire.switch("int8")
        found["switched to int8"] = said(wire)
    logger.removeHandler(log)
    return found


def test_nodes_that_do_not_suit_are_told_at_attach_and_in_the_report(four: Ranks) -> None:
    for rank, found in enumerate(four(on_unequal_nodes)):
        for name, each in found.items():
            falls_back = name in ("int8", "switched to int8")
            assert each.why_flat == ("nodes differ in size, from 1 to 3 ranks" if falls_back else "")
            assert len(each.warned) == (falls_back and rank == 0)
            assert all("differ in size" in line and "nodes=None" in line for line in each.warned)
            assert ("to 3 ranks: each rank sends codes to all others" in each.text) == falls_back


# -- beside training


@pytest.mark.parametrize("recipe", ["int4", pytest.param("int8", marks=pytest.mark.rest)])
def test_evaluations_between_steps_change_nothing(two: Ranks, recipe: str) -> None:
    looking, others = two(carried, recipe, "int8", evaluated), two(carried, recipe, "int8", plain)
    for found, other in zip(looking, others, strict=True):
        assert found.masters == other.masters
        assert found.step == other.step == 6


@dataclass(frozen=True)
class Copied:
    """What torch says to a deep copy and to a pickle; losses of a shallow copy and then of the model."""

    deep: str
    pickled: str
    losses: list[float]
    step: int


def copied(*, attaches: bool) -> Copied:
    """With a wire or without."""
    model = sharded()
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, "dense") if attaches else None
    train(model, optimizer, range(2))
    deep, pickled = (
        refusal(partial(way, model), AssertionError, pickle.PicklingError)
        for way in (copy.deepcopy, pickle.dumps)
    )
    shallow = copy.copy(model)  # has the same parameters, and torch gathers and scatters the same
    losses = train(shallow, optimizer, range(2, 4)) + train(model, optimizer, range(4, 6))
    return Copied(deep, pickled, losses, 6 if wire is None else wire.report().step)


def test_torch_makes_no_copy_that_could_keep_a_wire(two: Ranks) -> None:
    for found, other in zip(two(copied, attaches=True), two(copied, attaches=False), strict=True):
        assert "does not support deepcopy" in found.deep
        assert found.pickled
        assert (found.deep, found.pickled) == (other.deep, other.pickled)
        assert found.losses == other.losses, "a shallow copy is the same model"
        assert found.step == 6


@dataclass(frozen=True)
class InTurn:
    """What a pass with the other adapter raises, how many collectives it counts, and steps in the end."""

    said: str
    sent: int
    step: int


def in_turn(recipe: str) -> InTurn:
    """Two adapters in turn: one trains, the other is thawed in its place, and back; a reference between."""

    def turn(first: bool) -> None:
        for block, is_it in zip(model.blocks, (first, not first), strict=True):
            block[0].weight.requires_grad_(is_it)

    def calls() -> int:
        modules = wire.report().as_dict()["modules"]
        return sum(sum(each[what].values()) for each in modules for what in ("gathered", "scattered"))

    model = sharded(frozen=("first", "last", "side"))
    turn(first=True)
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, recipe)
    train(model, optimizer, range(2))
    turn(first=False)
    with torch.no_grad():
        loss_of(model, 2)
    reshard(model)
    before = calls()
    said = refusal(lambda: loss_of(model, 2).backward())
    sent = calls() - before
    turn(first=True)
    train(model, optimizer, range(2, 4))
    return InTurn(said, sent, wire.report().step)


def test_adapters_in_turn_are_refused_before_anything_is_sent_where_something_is_unsent(two: Ranks) -> None:
    assert [found.said for found in two(in_turn, "int8")] == ["", ""]
    for found in two(in_turn, "int4"):
        assert "were frozen or thawed after attach" in found.said
        assert "int4(feedback=False)" in found.said
        assert found.sent == 0
        assert found.step == 4


@dataclass(frozen=True)
class Nested:
    """Steps that are counted, steps that metrics tell, warnings of backward passes, and masters."""

    step: int
    told: list[int]
    warned: list[str]
    masters: str


def within_checkpoints(again: bool) -> Nested:
    """Trainings whose blocks are computed again in the backward pass."""
    model = sharded(partial(Layered, again=again))
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, "int4", gather="int8")
    told: list[int] = []
    wire.log_to(lambda _metrics, step: told.append(step), every=1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(model, optimizer, range(4))
        with wire.no_sync():
            loss_of(model, 4).backward()
        train(model, optimizer, range(5, 6))
    said = [str(each.message) for each in warned if "backward passes" in str(each.message)]
    return Nested(wire.report().step, told, said, bits(whole(model)))


def test_passes_that_checkpoints_nest_are_parts_of_one(two: Ranks) -> None:
    nested = two(within_checkpoints, True)
    for found in nested:
        assert found.step == len(found.told) == 5
        assert found.warned == []
    assert nested == two(within_checkpoints, False)


def told_without_a_wire() -> tuple[list[int], bool]:
    """A model whose wire nobody keeps, and whose metrics go to a function over the model: the steps that the
    function is told, and whether the model goes at last."""
    model, told = sharded(), list[int]()

    def take(of: nn.Module, _metrics: Any, step: int) -> None:
        assert of.training
        told.append(step)

    optimizer = adam(model)
    gradwire.attach(model, optimizer, "int4").log_to(partial(take, model), every=1)
    gc.collect()
    train(model, optimizer, range(3))
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    return told, gone() is None


def test_a_target_is_told_as_long_as_the_model_lives(two: Ranks) -> None:
    for told, is_gone in two(told_without_a_wire):
        assert len(told) == 3
        assert is_gone


# -- plans


PREDICTED = ("dense", "int8", "dense+int8", "bf16+bf16", "int8+int8", "int4+int8", "int8+exact")
"""Scatters, and after a plus gathers. Exact ones are of weights that stay, so that no bits are guessed."""


@dataclass(frozen=True)
class Costs:
    """Of a step: what a node sends over its link, and what a rank sends; what a rank keeps."""

    link_bytes: float
    rank_bytes: float
    kept_bytes: float
    is_two_levels: bool


def predicted(text: str, nodes: list[list[int]] | None) -> tuple[Costs, Costs]:
    """Planned, and counted."""
    how: dict[str, Any] = {"rate_bit_per_s": 1e9, "step_s": 0.1, "workers": dist.get_world_size()}
    if nodes is not None:
        how |= {"per_node": len(nodes[0]), "inside_bit_per_s": 1e10}
    recipe, _, gather = text.partition("+")
    model = nn.Sequential(nn.Linear(50, WIDTH), nn.Linear(WIDTH, 37))
    with patch("gradwire._api.plan_fsdp.EXACT_BITS", 0.0):
        [plan] = gradwire.plan(model, sharded=True, candidates=[text], **how).candidates
    policy = BF16 if gather == "exact" else MixedPrecisionPolicy()
    for each in (*model, model):
        fully_shard(each, mesh=mesh(), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if gather == "exact" else 0.01)
    wire = gradwire.attach(model, optimizer, recipe, gather=gather or None, nodes=nodes)
    for step in range(3):
        if step == 1:  # bytes count from here on: first gathers are as they are
            wire.switch(recipe)
        optimizer.zero_grad()
        model(torch.ones(3, 50)).square().mean().backward()
        optimizer.step()
    report = wire.report()
    sent, kept = report.wire_bytes_per_step, report.memory_bytes + report.as_dict()["held_bytes"]
    across, both = sent * how.get("per_node", 1), sent + report.inside_bytes_per_step
    return (
        Costs(plan.node_bytes, plan.wire_bytes, plan.memory_bytes, plan.two_levels),
        Costs(across, both, kept, report.per_node > 1),
    )


@pytest.mark.parametrize(
    "nodes", [NODES["in a row"], pytest.param(None, marks=pytest.mark.rest)], ids=["by nodes", "flat"]
)
@pytest.mark.timeout(240)
def test_plans_have_the_bytes_that_are_counted(four: Ranks, nodes: list[list[int]] | None) -> None:
    for text in PREDICTED:
        for planned, counted in four(predicted, text, nodes):
            if nodes is None or text != "dense":  # a wire that codes nothing does not tell links apart
                assert counted.link_bytes == pytest.approx(planned.link_bytes), text
            assert counted.rank_bytes == pytest.approx(planned.rank_bytes), text
            # A plan's memory is without what fills shards up.
            assert planned.kept_bytes <= counted.kept_bytes < 1.2 * planned.kept_bytes + 1, text
            assert counted.is_two_levels == planned.is_two_levels == (nodes is not None and text != "dense")
