"""A step that the user leaves out leaves no trace: every recipe, with one exchange in the step or several."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.memory import UNSENT
from gradwire.recipes import recipe
from gradwire.unit.context import Fates
from tests.support.depth import FEW
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, REMEMBERING, kind
from tests.support.rig import NAMES, Rig, gradients

FIXED = [name for name, text in EVERY_RECIPE.items() if recipe(text).build().next is None]
ALL = frozenset(NAMES)
DROPPED, OPEN = Fates(dropped=ALL, made=False), Fates(open=ALL, made=False)

VARIANTS = {
    "flat": {},
    "bfloat16 memory": {"memory_dtype": torch.bfloat16},
    "committed late": {"commits": "late"},
    "nodes": {"per_node": 2},
}
every_recipe = partial(looped, "name", by=kind, few=1)


def _bad(rank: int, number: int) -> dict[str, Tensor]:
    return {name: 1e4 * values for name, values in gradients(rank, 50 + number).items()}


def _momentum(rig: Rig) -> bool:
    return any(flat_buffer.memory.covers_momentum for flat_buffer in rig.reducer.layout.flat_buffers)


@looped(
    ("name", "variant", "exchanges"),
    product(FIXED, VARIANTS, (1, 2, 3)),
    by=lambda row: kind(row[0]) if FEW else f"{kind(row[0])}, {row[1]}, {row[2]}",
    few=1,
)
def test_after_a_dropped_step_training_goes_on_as_if_it_had_never_been(
    name: str, variant: str, exchanges: int
) -> None:
    options = VARIANTS[variant]
    world = 4 if variant == "nodes" else 2

    def rank(comm: Comm) -> None:
        rigs = [Rig(comm, EVERY_RECIPE[name], unit_elements=389, **options) for _ in range(2)]
        rig = rigs[0]
        for step in range(2):
            for each in rigs:
                each.step(gradients(comm.rank, step))
        for each in rigs:
            each.reducer.catch_up(Fates())
        before, number = rig.planes, rig.reducer.step
        for exchange in range(exchanges):
            outcome = rig.step(_bad(comm.rank, exchange))
            if exchange and _momentum(rig):
                assert "enter the momentum twice" in str(outcome.error)
            else:
                assert outcome.error is None
            if exchange < exchanges - 1:
                assert not rig.reducer.catch_up(OPEN)
                assert rig.reducer.step == number, "exchanges of one step have one number"
        assert rig.reducer.catch_up(DROPPED)
        assert rig.reducer.step == number
        after = rig.planes
        assert after.keys() == before.keys()
        assert all(torch.equal(after[each], before[each]) for each in before)
        if rig.reducer.layout.main.watch is not None:
            return  # it has learned from the step how long one takes, and may choose otherwise
        for step in range(2, 5):
            again, expected = (each.step(gradients(comm.rank, step)) for each in rigs)
            assert torch.equal(again.flat(), expected.flat())

    run_ranks(world, rank)


@every_recipe(FIXED)
def test_an_overflow_that_is_left_out_takes_no_earlier_step_back(name: str) -> None:
    """As under a scaler: the optimizer skips its step, and the gradients are cleared."""

    def rank(comm: Comm) -> None:
        rig = Rig(comm, EVERY_RECIPE[name], unit_elements=389)
        for step in range(2):
            rig.step(gradients(comm.rank, step))
        before, number = rig.planes, rig.reducer.step
        grads = gradients(comm.rank, 2)
        if comm.rank == 1:
            grads["middle.weight"][7] = torch.inf
        assert not rig.step(grads).step.committed
        assert not rig.reducer.catch_up(DROPPED), "no step was made"
        assert rig.reducer.step == number
        assert rig.planes.keys() == before.keys()
        assert all(torch.equal(plane, before[each]) for each, plane in rig.planes.items())

    run_ranks(2, rank)


@every_recipe(REMEMBERING)
def test_by_parameter_what_was_used_stays_and_what_was_cleared_goes_back(name: str) -> None:
    half = frozenset(["last.weight", "last.bias", "scalar"])

    def rank(comm: Comm) -> None:
        rig = Rig(comm, EVERY_RECIPE[name], unit_elements=389)
        rig.step(gradients(comm.rank, 0))
        before, number = rig.planes, rig.reducer.step
        rig.step(gradients(comm.rank, 1))
        used = rig.planes
        assert not rig.reducer.catch_up(Fates(dropped=half)), "the step was made for the others"
        assert rig.reducer.step == number + 1
        for key, plane in rig.planes.items():
            wanted = before.get(key, torch.zeros_like(plane)) if key[0] in half else used[key]
            assert torch.equal(plane, wanted), key

    run_ranks(2, rank)


@looped(
    ("name", "earlier"),
    product([name for name in REMEMBERING if name not in ("dgc", "signum")], (0, 1)),
    by=lambda row: f"{kind(row[0])}, {row[1]} before",
    few=1,
)
def test_what_is_open_is_final_once_its_optimizer_steps_and_a_checkpoint_has_none_of_it(
    name: str, earlier: int
) -> None:
    late = frozenset(["first.weight", "first.bias"])

    def rank(comm: Comm) -> None:
        rig = Rig(comm, EVERY_RECIPE[name], unit_elements=389)
        if _momentum(rig):
            return
        for step in range(earlier):
            rig.step(gradients(comm.rank, step))
        before = rig.planes
        rig.step(gradients(comm.rank, 1))
        rig.reducer.catch_up(Fates(open=late))
        saved, used = state.save(rig.reducer), rig.planes
        held = {(parameter, UNSENT): plane.view(-1) for parameter, plane in saved["memory"].items()}
        for kept, tensors in saved["kept"].items():
            held |= {(parameter, kept): tensor for parameter, tensor in tensors.items()}
        wanted = {key: plane for key, plane in used.items() if key[0] not in late}
        wanted |= {key: plane for key, plane in before.items() if key[0] in late}
        assert held.keys() == wanted.keys()
        assert all(torch.equal(plane, wanted[key].to(plane.dtype)) for key, plane in held.items())
        outcome, number = rig.step(gradients(comm.rank, 2)), rig.reducer.step
        assert outcome.error is None
        now = rig.planes
        rig.reducer.catch_up(Fates())
        assert rig.reducer.step == number
        assert all(torch.equal(plane, now[key]) for key, plane in rig.planes.items())

    run_ranks(2, rank)


@looped(
    ("before", "after"),
    [
        ("scalecom(rate=10, beta=0.5, warmup_steps=0)", "topk(ratio=0.1)"),
        ("powersgd(warmup_steps=0)", "mergecomp(inner='powersgd(warmup_steps=0)', split='even', groups=2)"),
    ],
)
def test_a_switch_within_an_open_step_can_be_undone_with_the_step(before: str, after: str) -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, before)
        rig.step(gradients(comm.rank, 0))
        weight = rig.reducer.layout.flat_buffers[0].memory.weight
        was = rig.planes
        assert any(plane.any() for plane in was.values())
        rig.step(_bad(comm.rank, 0))
        rig.reducer.catch_up(OPEN)
        rig.reducer.install(recipe(after).build())
        rig.step(_bad(comm.rank, 1))
        assert rig.reducer.catch_up(DROPPED)
        assert rig.planes.keys() == was.keys()
        for key, plane in rig.planes.items():
            assert torch.equal(plane, was[key] * weight if key[1] == UNSENT else was[key]), key

    run_ranks(2, rank)


def test_a_step_that_waits_for_its_optimizer_keeps_what_is_owed_from_a_recipe_without_memory() -> None:
    def rank(comm: Comm) -> list[str]:
        rig = Rig(comm, "topk(ratio=0.1)")
        rig.step(gradients(comm.rank, 0))
        before = rig.memory
        rig.reducer.follow(recipe("dense").build())
        ran = [rig.reducer.layout.main.text]
        rig.step(_bad(comm.rank, 0))  # takes all that is unsent along
        rig.reducer.catch_up(OPEN)
        rig.reducer.follow(recipe("dense").build())
        assert rig.reducer.layout.flat_buffers, "what was taken along may still come back"
        rig.reducer.catch_up(DROPPED)
        for name, plane in rig.memory.items():
            assert torch.equal(plane, before.get(name, torch.zeros_like(plane)))
        rig.step(gradients(comm.rank, 1))
        rig.reducer.catch_up(Fates())
        rig.reducer.follow(recipe("dense").build())
        return [*ran, rig.reducer.layout.main.text]

    for first, then in run_ranks(2, rank):
        assert (first, then) != ("dense", "dense")
        assert then == "dense"


def test_open_parameters_cost_a_copy_of_their_own_planes_alone() -> None:
    def rank(comm: Comm) -> tuple[int, int]:
        rig = Rig(comm, "topk(ratio=0.1)")
        rig.step(gradients(comm.rank, 0))
        flat_buffer = rig.reducer.layout.flat_buffers[0]
        rig.reducer.catch_up(Fates())
        assert not flat_buffer.open_names, "where one exchange makes a step, the old plane is still there"
        rig.step(gradients(comm.rank, 1))
        rig.reducer.catch_up(Fates(open=frozenset(["middle.weight"])))
        return len(flat_buffer.open_names), sum(
            flat_buffer.final(*_slot(rig, each)).numel() for each in flat_buffer.open_names
        )

    assert run_ranks(2, rank) == [(1, 53 * 41)] * 2


def _slot(rig: Rig, name: str) -> tuple[object, str]:
    return rig.reducer.layout.slots[name][1], UNSENT
