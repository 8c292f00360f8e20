"""Real gloo ranks: the weights that FSDP2's own gathers bring, when gradwire carries them."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import gradwire
from tests.process.fsdp_models import (
    BF16,
    NODES,
    Layered,
    adam,
    bits,
    in_backward,
    kinds,
    loss_of,
    move,
    reshard,
    sharded,
    train,
    whole,
)
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process


def seen(model: Any) -> list[Tensor]:
    """A list that fills with the first block's weight, in each of its forward passes and before its
    backward."""
    linear, found = model.blocks[0][0], list[Tensor]()

    def note(module: Any, *_: Any) -> None:
        found.append(module.weight.detach().clone())

    linear.register_forward_pre_hook(note)
    linear.register_full_backward_pre_hook(note)
    return found


def master_of(model: Any) -> Tensor:
    """That weight as it is sharded."""
    reshard(model)
    found: Tensor = model.blocks[0][0].weight.full_tensor().detach()
    return found.clone()


def rounding(gathered: Tensor, master: Tensor) -> float:
    """The largest error of a gathered weight, in halves of the distance of two codes of its largest value."""
    return float((gathered.double() - master.double()).abs().max() / (master.double().abs().max() / 254))


@dataclass(frozen=True)
class Gathered:
    """A block's weight in a pass."""

    weights: list[str]
    """In forward, recomputation and backward."""
    rounding: float
    master: str
    in_bf16: str
    """The master, rounded to the nearest."""
    master_after: str
    kinds: list[str]
    said: list[str]
    """In the log."""


def gathers(gather: Any, again: bool | None = None, **how: Any) -> Gathered:
    model = sharded(partial(Layered, again=again), **how)
    wire = gradwire.attach(model, adam(model), "dense", gather=gather)
    values, master = seen(model), master_of(model)
    log, logger = BufferingHandler(100), logging.getLogger("gradwire")
    logger.addHandler(log)
    level = logger.level
    logger.setLevel(logging.INFO)
    loss_of(model, 0).backward()
    logger.setLevel(level)
    logger.removeHandler(log)
    return Gathered(
        [bits(each.float()) for each in values],
        rounding(values[0], master),
        bits(master),
        bits(master.to(torch.bfloat16).float()),
        bits(master_of(model)),
        kinds(wire, "gathered"),
        [f"{each.levelname}: {each.getMessage()}" for each in log.buffer],
    )


@pytest.mark.parametrize(
    ("again", "how", "times"), [(None, {}, 2), (False, {}, 3), (None, {"mp_policy": BF16}, 2)], ids=str
)
def test_all_ranks_compute_with_the_same_rounded_weights_and_masters_stay_exact(
    two: Ranks, again: bool | None, how: dict[str, Any], times: int
) -> None:
    found = two(gathers, "int8", again, **how)
    assert found[0].weights == found[1].weights
    for each in found:
        assert each.weights == each.weights[:1] * times, "in forward, recomputation and backward"
        assert 0.0 < each.rounding <= (2.1 if how else 1.0)
        assert each.master_after == each.master
        assert each.kinds == ["int8"]


def test_a_gather_in_bf16_rounds_to_the_nearest_and_leaves_16_bits_as_they_are(two: Ranks) -> None:
    for found in two(gathers, "bf16"):
        assert found.weights[0] == found.in_bf16 != found.master
        assert found.kinds == ["bf16"]
    first, second = two(gathers, "bf16", mp_policy=BF16)
    for found in (first, second):
        assert found.weights[0] == found.in_bf16
        assert found.kinds == ["bfloat16, which has 16 bits already"]
    assert first.said == ["INFO: parameters are gathered in bfloat16, which has 16 bits already"]
    assert second.said == []
    for found in two(gathers, None):
        assert found.weights[0] == found.master


def test_a_gather_over_another_group_goes_as_it_is_and_the_report_says_so(four: Ranks) -> None:
    found = four(gathers, "int8", reshard_after_forward=2)
    rule = "float32 over groups of 2 (reshard_after_forward), as these values are rounded already"
    for each in found:
        assert each.weights == [found[0].weights[0]] * 2
        assert each.kinds == [rule, "int8"]
    assert [each.said for each in found] == [[f"INFO: parameters are gathered in {rule}"], [], [], []]


@dataclass(frozen=True)
class Moved:
    """A block's master before and after it has been moved, and the weight that is gathered then."""

    before: str
    now: str
    gathered: str
    rounding: float
    kinds: list[str]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
MOVED = (*OPTIMIZERS, ".data", "_local_tensor", "load_state_dict", "dcp", "average", "in backward")


def moved_by(how: str) -> Moved:
    """A gather sends what masters are now, whatever has moved them, and whatever torch has counted of it."""
    model = sharded()
    optimizer = in_backward(model) if how == "in backward" else adam(model, **OPTIMIZERS.get(how, {}))
    is_within = how == "in backward"  # then gradwire sees no step
    wire = gradwire.attach(model, None if is_within else optimizer, "dense", gather="int8")
    values, before = seen(model), master_of(model)
    train(model, optimizer, range(2))
    if how not in (*OPTIMIZERS, "in backward", "dcp"):  # which goes back to where it is now
        before = master_of(model)
    move(how, model, optimizer)
    now = master_of(model)
    values.clear()
    model.eval()
    with torch.no_grad():
        loss_of(model, 9)
    reshard(model)
    return Moved(bits(before), bits(now), bits(values[0]), rounding(values[0], now), kinds(wire, "gathered"))


@pytest.mark.parametrize("how", rest(MOVED, but=["fused", "load_state_dict"]))
def test_a_gather_sends_masters_as_they_are_now(two: Ranks, how: str) -> None:
    found = two(moved_by, how)
    assert found[0].gathered == found[1].gathered
    for each in found:
        assert each.now != each.before
        assert each.now != each.gathered
        assert each.rounding <= 1.0
        assert each.kinds == ["int8"]


@dataclass(frozen=True)
class Exact:
    """Weights before, within and after `exact()`, and their masters: of a block, and of the root."""

    block: list[str]
    block_master: str
    root: list[str]
    root_master: str
    kinds: list[str]


def exactly() -> Exact:
    """The root was left gathered."""
    model = sharded()
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, "dense", gather="int8")
    train(model, optimizer, range(1))
    block, master = seen(model), master_of(model)
    root: list[Tensor] = []
    model.first.register_forward_pre_hook(lambda module, _: root.append(module.weight.detach().clone()))
    for scope in (nullcontext, wire.exact, nullcontext):
        with scope(), torch.no_grad():
            loss_of(model, 1)
    reshard(model)
    first = bits(model.first.weight.full_tensor().detach())
    return Exact([*map(bits, block)], bits(master), [*map(bits, root)], first, kinds(wire, "gathered"))


def test_within_exact_weights_are_the_masters(two: Ranks) -> None:
    for found in two(exactly):
        assert [each == found.block_master for each in found.block] == [False, True, False]
        assert [each == found.root_master for each in found.root] == [False, True, False]
        assert found.kinds == ["float32, as wire.exact() asks", "int8"]


@dataclass(frozen=True)
class Asked:
    """A block's weight within `exact()` and after it, and its master."""

    within: str
    after: str
    master: str


def exactly_though_asked_before() -> Asked:
    """A gather is on its way when `exact()` begins, and another one when it ends."""
    model = sharded()
    wire = gradwire.attach(model, adam(model), "dense", gather="int8")
    train(model, adam(model), range(1))
    values, master, block = seen(model), master_of(model), model.blocks[0]
    block.unshard(async_op=True)
    with wire.exact(), torch.no_grad():
        loss_of(model, 1)
        block.reshard()
        block.unshard(async_op=True)
    with torch.no_grad():
        loss_of(model, 1)
    within, after = map(bits, values)
    return Asked(within, after, bits(master))


def test_a_gather_on_its_way_is_none_of_what_exact_begins_or_ends(two: Ranks) -> None:
    for found in two(exactly_though_asked_before):
        assert found.within == found.master != found.after


@dataclass(frozen=True)
class OnNodes:
    """A block's weight in forward and backward, and within `exact()`; bytes of gathers in a pass."""

    weights: list[str]
    exactly: str
    master: str
    across_bytes: float
    inside_bytes: float


def gathers_by_nodes(nodes: list[list[int]] | None) -> OnNodes:
    """`None` is one all-gather among all ranks."""
    model = sharded()
    wire = gradwire.attach(model, adam(model), "dense", gather="int8", nodes=nodes)
    values = seen(model)
    loss_of(model, 0).backward()
    report = wire.report()
    with wire.exact(), torch.no_grad():
        loss_of(model, 0)
    *usual, exact = map(bits, values)
    across = report.as_dict()["gather_bytes_per_step"]
    return OnNodes(usual, exact, bits(master_of(model)), across, report.inside_bytes_per_step)


@pytest.mark.parametrize("how", rest(NODES, but=["apart"]))
def test_gathers_by_nodes_bring_the_weights_of_one_among_all_ranks(four: Ranks, how: str) -> None:
    flat = four(gathers_by_nodes, None)
    assert len({tuple(each.weights) for each in flat}) == 1
    for found, other in zip(four(gathers_by_nodes, NODES[how]), flat, strict=True):
        assert found.weights == other.weights
        assert found.exactly == found.master
        assert other.inside_bytes == 0.0
        # Of three rows from other ranks, one comes from the other node. The neighbour passes on two.
        assert found.across_bytes == other.across_bytes / 3
        assert found.inside_bytes > 2 * found.across_bytes


@dataclass(frozen=True)
class Inside:
    """A training on two nodes of two; a block's weight after it: usually, within `exact()` and detached."""

    losses: list[float]
    masters: str
    weights: list[str]
    master: str
    gathered: list[str]
    scattered: list[str]
    text: str


def inside_nodes(*, codes: bool) -> Inside:
    """One recipe between them, and FSDP2's own traffic inside, coded or not."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    model = sharded(over=grid["ranks"])
    optimizer = adam(model)
    how: dict[str, Any] = {"inside": "int8", "gather": "int8"} if codes else {}
    wire = gradwire.attach(model, optimizer, "dense", replicas=grid["nodes"], **how)
    losses, masters = train(model, optimizer, range(6)), bits(whole(model))
    values, master = seen(model), master_of(model)
    with torch.no_grad():
        loss_of(model, 7)
    with wire.exact() if codes else nullcontext(), torch.no_grad():
        loss_of(model, 7)
    told = kinds(wire, "gathered"), kinds(wire, "scattered"), str(wire.report())
    wire.detach()
    with torch.no_grad():
        loss_of(model, 7)
    return Inside(losses, masters, [*map(bits, values)], bits(master), *told)


def test_inside_nodes_its_own_traffic_travels_in_few_bits_beside_a_recipe_between_them(four: Ranks) -> None:
    coded = four(inside_nodes, codes=True)
    assert len({each.masters for each in coded}) == 1
    for found, other in zip(coded, four(inside_nodes, codes=False), strict=True):
        assert found.masters != other.masters
        assert abs(found.losses[-1] - other.losses[-1]) < 0.1 * other.losses[0]
        assert [each == found.master for each in found.weights] == [False, True, True]
        assert found.gathered == ["float32, as wire.exact() asks", "int8"]
        assert found.scattered == ["int8"]
        assert "FSDP2 sends" in found.text
