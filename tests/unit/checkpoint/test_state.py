"""Exact checkpoints, on threads: whatever continues does so bit for bit, and what does not fit is refused."""

from __future__ import annotations

import io
import warnings
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.checkpoint import state
from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.comm import Comm, run_ranks
from gradwire.errors import GradwireWarning, PeerFailed, RanksDisagree
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import gather
from gradwire.memory import UNSENT, LowPass
from gradwire.recipes import recipe
from gradwire.sources.checks import check_momentum
from gradwire.unit.context import Fates
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, REMEMBERING, kind
from tests.support.rig import NAMES, REVERSED, SHUFFLED, Rig, gradients

pytestmark = pytest.mark.filterwarnings("error")

DGC = "dgc(ratio=0.1, warmup_steps=0)"


def _memory(name: str) -> Hashable:
    memory = recipe(EVERY_RECIPE[name]).build().exchange.memory
    assert memory is not None
    return type(memory), memory.planes


KINDS = list({(kind(name), _memory(name)): name for name in REMEMBERING}.values())
"""One recipe of each way to travel with each kind of memory."""


def _steps(rig: Rig, rank: int, steps: range, buckets: Any = REVERSED) -> list[Tensor]:
    return [rig.step(gradients(rank, step), buckets).flat() for step in steps]


def _saved(world: int, recipe: str, steps: int, **options: Any) -> list[dict[str, Any]]:
    def rank(comm: Comm) -> dict[str, Any]:
        rig = Rig(comm, recipe, **options)
        _steps(rig, comm.rank, range(steps))
        return state.save(rig.reducer)

    return run_ranks(world, rank)


def _round_trip(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@looped("name", [*KINDS, "dense"])
def test_a_resumed_run_continues_bit_for_bit_in_other_buckets(name: str) -> None:
    def rank(comm: Comm) -> None:
        through = Rig(comm, EVERY_RECIPE[name])
        _steps(through, comm.rank, range(3))
        saved = _round_trip(state.save(through.reducer))
        resumed = Rig(comm, EVERY_RECIPE[name])
        state.load(resumed.reducer, saved)
        expected = _steps(through, comm.rank, range(3, 7))
        found = _steps(resumed, comm.rank, range(3, 7), SHUFFLED)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert resumed.memory.keys() == through.memory.keys()
        assert all(torch.equal(resumed.memory[each], through.memory[each]) for each in through.memory)

    run_ranks(3, rank)


def test_a_list_of_all_states_of_the_same_world_gives_everybody_his_own() -> None:
    states = _saved(3, "topk(ratio=0.1)", 2)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)")
        state.load(rig.reducer, states[::-1])
        for name, memory in states[comm.rank]["memory"].items():
            assert torch.equal(rig.memory[name], memory.view(-1))

    run_ranks(3, rank)


@looped(("name", "before", "after"), [(name, *way) for name in KINDS for way in ((None, 700), (700, None))])
def test_what_is_remembered_moves_into_larger_and_smaller_units(
    name: str, before: int | None, after: int | None
) -> None:
    states = _saved(2, EVERY_RECIPE[name], 2, unit_elements=before)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, EVERY_RECIPE[name], unit_elements=after)
        state.load(rig.reducer, _round_trip(states[comm.rank]))
        for parameter, memory in states[comm.rank]["memory"].items():
            assert torch.equal(rig.memory[parameter], memory.view(-1))
        assert rig.step(gradients(comm.rank, 2)).step.committed

    run_ranks(2, rank)


@looped(("name", "world"), [*((name, 2) for name in KINDS), ("topk", 1), ("topk", 5)])
def test_in_another_world_everybody_starts_with_the_mean(name: str, world: int) -> None:
    states = _saved(3, EVERY_RECIPE[name], 2)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, EVERY_RECIPE[name])
        state.load(rig.reducer, states)
        for parameter, memory in rig.memory.items():
            expected = torch.stack([old["memory"][parameter].view(-1) for old in states]).mean(0)
            assert torch.equal(memory, expected)
        assert rig.reducer.step == 2
        assert rig.step(gradients(comm.rank, 2)).step.committed

    run_ranks(world, rank)


def test_a_mean_loads_on_any_rank_of_any_world() -> None:
    def save(comm: Comm) -> dict[str, Any]:
        rig = Rig(comm, "topk(ratio=0.1)")
        _steps(rig, comm.rank, range(2))
        return {"mean": state.save_mean(rig.reducer), "own": state.save(rig.reducer)}

    saved = run_ranks(3, save)
    mean = _round_trip(saved[0]["mean"])
    for name, memory in mean["memory"].items():
        expected = torch.stack([each["own"]["memory"][name] for each in saved]).double().mean(0)
        # Three products and two sums in float32 of numbers below 8.
        assert (memory - expected).abs().max() <= 8 * 5 * torch.finfo(torch.float32).eps
        assert all(torch.equal(each["mean"]["memory"][name], memory) for each in saved)

    def load(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)")
        state.load(rig.reducer, mean)
        assert all(torch.equal(rig.memory[name], mean["memory"][name].view(-1)) for name in rig.memory)

    run_ranks(2, load)


def test_saved_tensors_are_copies() -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)")
        _steps(rig, comm.rank, range(2))
        saved = state.save(rig.reducer)
        before = {name: memory.clone() for name, memory in saved["memory"].items()}
        _steps(rig, comm.rank, range(2, 5))
        assert all(torch.equal(saved["memory"][name], before[name]) for name in before)

    run_ranks(1, rank)


def _refusals(
    states: Any, world: int = 2, recipe: str = "topk(ratio=0.1)", **options: Any
) -> list[Exception]:
    """What every rank raises when rank r loads `states(r)`, and that memory then is as before."""

    def rank(comm: Comm) -> Exception:
        rig = Rig(comm, recipe, **options)
        _steps(rig, comm.rank, range(1))
        before, number = rig.memory, rig.reducer.step
        with pytest.raises((ValueError, RanksDisagree)) as caught:
            state.load(rig.reducer, states(comm.rank))
        assert all(torch.equal(rig.memory[each], before[each]) for each in before)
        assert rig.reducer.step == number
        return caught.value

    return run_ranks(world, rank)


def test_rank_0s_state_on_every_rank_is_refused_on_every_rank() -> None:
    states = _saved(2, "topk(ratio=0.1)", 2)
    fits, refuses = _refusals(lambda _rank: states[0])
    assert isinstance(fits, RanksDisagree), "or it would wait for the others"
    assert "the state to load" in str(fits)
    assert isinstance(refuses, ValueError)
    assert "rank 0's of 2, this is rank 1 of 2" in str(refuses)
    assert "mean_state_dict()" in str(refuses)


def test_another_worlds_single_state_is_refused() -> None:
    states = _saved(3, "topk(ratio=0.1)", 2)
    for error in _refusals(lambda rank: states[rank]):
        assert isinstance(error, ValueError)
        assert "a list of all ranks'" in str(error)


def test_a_list_with_a_gap_or_a_mean_in_it_is_refused() -> None:
    states = _saved(3, "topk(ratio=0.1)", 2)
    short = _refusals(lambda _rank: states[:2])
    assert all("all 3 old ranks, got ranks [0, 1]" in str(error) for error in short)
    assert all("missing='drop'" in str(error) for error in short)
    mean = {**states[0], "rank": None, "world": None}
    assert all("load a mean alone" in str(error) for error in _refusals(lambda _rank: [mean, states[1]]))
    assert all("empty" in str(error) for error in _refusals(lambda _rank: []))


def test_states_of_several_ranks_in_one_dictionary_are_a_list_of_them() -> None:
    states = _saved(3, "topk(ratio=0.1)", 2)
    merged: dict[str, Any] = {}
    for each in states:
        merged |= state.keyed(each)
    assert merged.keys() == {"rank0", "rank1", "rank2"}, "no rank's has overwritten another's"

    def rank(comm: Comm) -> dict[str, Tensor]:
        rig = Rig(comm, "topk(ratio=0.1)")
        state.load(rig.reducer, merged)
        return rig.memory

    for found, saved in zip(run_ranks(3, rank), states, strict=True):
        assert all(torch.equal(found[name], memory.view(-1)) for name, memory in saved["memory"].items())
    for found in run_ranks(2, rank):
        for name in found:
            expected = torch.stack([each["memory"][name].view(-1) for each in states]).mean(0)
            assert torch.equal(found[name], expected)


@pytest.mark.parametrize("world", [2, 3])
def test_survivors_alone_are_loaded_only_on_demand_and_that_is_said(world: int) -> None:
    states = _saved(3, "topk(ratio=0.1)", 2)
    survivors = [state.keyed(states[0]), state.keyed(states[2])]
    assert all("got ranks [0, 2]" in str(error) for error in _refusals(lambda _rank: survivors, world))

    def rank(comm: Comm) -> dict[str, Tensor]:
        rig = Rig(comm, "topk(ratio=0.1)")
        state.load(rig.reducer, survivors, missing="drop")
        return rig.memory

    with pytest.warns(GradwireWarning, match="old rank 1 had not sent is lost"):
        memories = run_ranks(world, rank)
    for found in memories:
        for name in found:
            expected = torch.stack([states[each]["memory"][name].view(-1) for each in (0, 2)]).mean(0)
            assert torch.equal(found[name], expected)


def test_ranks_with_different_survivors_disagree() -> None:
    states = _saved(3, "topk(ratio=0.1)", 2)

    def rank(comm: Comm) -> str:
        with pytest.raises(RanksDisagree) as caught:
            state.load(Rig(comm, "topk(ratio=0.1)").reducer, [states[comm.rank]], missing="drop")
        return str(caught.value)

    assert all("kind of state" in said and "without [1, 2]" in said for said in run_ranks(2, rank))


MORE = {"first": (37, 61), "middle": (53, 41), "last": (47, 59)}
FEWER = {name: MORE[name] for name in ("first", "last")}
WIDER = {**MORE, "middle": (54, 41)}
"""Two shards of 53 rows, and two of 54, have 27 rows each."""


@looped("given", ["own", "all", "mean"])
@looped("recipe", ["topk(ratio=0.1)", "powersgd", DGC])
@looped(("before", "after"), [(MORE, FEWER), (FEWER, MORE), (MORE, WIDER)])
def test_shards_that_fit_go_along_when_parameters_have_changed(
    before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]], recipe: str, given: str
) -> None:
    def made(comm: Comm, shapes: dict[str, tuple[int, ...]]) -> Rig:
        rig, draw = Rig(comm, recipe, per_node=2, shapes=shapes), torch.Generator().manual_seed(comm.rank)
        for _ in range(2):
            grads = {name: torch.randn(torch.Size(of).numel(), generator=draw) for name, of in shapes.items()}
            assert rig.step(grads, [[name] for name in shapes]).step.committed
        return rig

    def saved(comm: Comm) -> tuple[dict[str, Any], dict[str, Any]]:
        rig = made(comm, before)
        return state.save(rig.reducer), state.save_mean(rig.reducer)

    def loaded(comm: Comm) -> dict[tuple[str, str], Tensor]:
        rig, (own, mean) = made(comm, after), found[comm.rank]
        states = {"own": own, "all": [each for each, _mean in found], "mean": mean}[given]
        with pytest.raises(ValueError, match="other parameter names, shapes"):
            state.load(rig.reducer, states)
        state.load(rig.reducer, states, missing="drop")
        planes = rig.planes
        if given == "mean":
            saved = state.save_mean(rig.reducer)
            assert all(torch.equal(saved["memory"][name], mean["memory"][name]) for name in same)
        else:
            assert all(torch.equal(planes[name, UNSENT], own["memory"][name].view(-1)) for name in same)
            for kind, tensors in own["kept"].items():
                assert all(torch.equal(planes[name, kind], tensors[name]) for name in tensors if name in same)
        return planes

    same = {name for name in before if after.get(name) == before[name]}
    found = run_ranks(4, saved)
    with pytest.warns(GradwireWarning, match="parameters have changed since the state was saved: middle"):
        memories = run_ranks(4, loaded)
    for planes in memories:
        fresh = [plane for (name, _kind), plane in planes.items() if name not in same]
        assert all(not plane.any() for plane in fresh)
        assert fresh or not after.keys() - same


def test_another_word_for_what_is_missing_is_refused() -> None:
    states = _saved(1, "topk(ratio=0.1)", 1)

    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match="missing='ignore' is neither 'refuse' nor 'drop'"):
            state.load(Rig(comm, "topk(ratio=0.1)").reducer, states, missing="ignore")  # type: ignore[arg-type]

    run_ranks(1, rank)


def test_a_list_of_different_steps_is_refused() -> None:
    states, later = _saved(3, "topk(ratio=0.1)", 2), _saved(3, "topk(ratio=0.1)", 3)
    mixed = [states[0], later[1], states[2]]
    assert all("different steps" in str(error) for error in _refusals(lambda _rank: mixed))


def test_a_state_of_another_model_or_format_is_refused() -> None:
    states = _saved(2, "topk(ratio=0.1)", 2)
    renamed = [{**each, "layout": "0" * 16, "memory": {"other.weight": torch.zeros(1)}} for each in states]
    errors = _refusals(lambda rank: renamed[rank])
    assert all("another" in str(error) or "other.weight" in str(error) for error in errors)
    for old in (1, 4):
        said = _refusals(lambda rank, old=old: {**states[rank], "format": old})
        assert all(f"format {old}; this version reads 5 and 6. An older gradwire" in str(e) for e in said)
    assert all("reads 5 and 6" in str(e) for e in _refusals(lambda rank: {**states[rank], "format": 7}))
    assert all("format None" in str(error) for error in _refusals(lambda _rank: {"model": "weights"}))


def test_what_is_no_state_or_has_another_shape_is_refused() -> None:
    states = _saved(2, "topk(ratio=0.1)", 2)
    bent = [{**each, "memory": {**each["memory"], "middle.weight": torch.zeros(3)}} for each in states]
    assert all("has shape (3,)" in str(error) for error in _refusals(lambda rank: bent[rank]))
    poor = [{key: each[key] for key in ("format", "layout", "memory")} for each in states]
    assert all("state lacks kept, plan" in str(error) for error in _refusals(lambda rank: poor[rank]))
    assert all("not a state of gradwire" in str(error) for error in _refusals(lambda _rank: [5]))


def test_ranks_that_load_different_steps_disagree_on_all_ranks() -> None:
    early, late = _saved(2, "topk(ratio=0.1)", 2), _saved(2, "topk(ratio=0.1)", 3)
    for error in _refusals(lambda rank: (early, late)[rank][rank]):
        assert isinstance(error, RanksDisagree)
        assert "step" in str(error)


def test_a_mean_on_some_ranks_and_their_own_on_others_is_refused_on_all() -> None:
    states = _saved(2, "topk(ratio=0.1)", 2)
    mean = {**states[0], "rank": None, "world": None}
    for error in _refusals(lambda rank: mean if rank else states[0]):
        assert isinstance(error, RanksDisagree)
        assert "kind of state" in str(error)


def test_memory_of_a_parameter_that_the_policy_now_sends_densely_is_refused_on_all_ranks() -> None:
    states = _saved(2, "topk(ratio=0.1)", 2)
    policy = {"*.bias": "dense", "scalar": "dense", "nothing": "dense", "middle.weight": "dense"}

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)", policy=policy)
        with pytest.raises(ValueError, match=r"middle\.weight.*keep the policy"):
            state.load(rig.reducer, states[comm.rank])

    run_ranks(2, rank)


def test_the_loaded_plan_goes_on_and_says_so_when_another_recipe_was_asked_for() -> None:
    states = _saved(1, "covap(interval=3)", 4)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)")
        with pytest.warns(GradwireWarning, match=r"covap\(interval=3\), not with the recipe topk\(ratio=0"):
            state.load(rig.reducer, states[0])
        assert rig.reducer.layout.main.text == "covap(interval=3)"

    run_ranks(1, rank)


def test_a_warning_made_an_error_finds_everything_loaded() -> None:
    states = _saved(1, "covap(interval=3)", 4)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(GradwireWarning, match="not with the recipe"):
                state.load(rig.reducer, states[0])
        assert rig.reducer.step == 4
        assert all(torch.equal(rig.memory[name], kept.view(-1)) for name, kept in states[0]["memory"].items())

    run_ranks(1, rank)


def test_an_adaptive_recipe_resumes_with_its_decision_without_measuring_again() -> None:
    states = _saved(1, "covap", 6)
    assert states[0]["plan"].startswith("covap(interval=")

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "covap")
        state.load(rig.reducer, states[0])
        assert not rig.reducer.measuring
        assert rig.reducer.layout.main.text == states[0]["plan"]
        assert rig.reducer.layout.main.why.startswith("loaded; CCR")

    run_ranks(1, rank)


def test_a_run_saved_while_it_measures_measures_again() -> None:
    states = _saved(1, "covap", 2)
    assert states[0]["plan"] is None

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "covap")
        state.load(rig.reducer, states[0])
        assert rig.reducer.measuring
        _steps(rig, 0, range(2, 7))
        assert not rig.reducer.measuring

    run_ranks(1, rank)


def test_every_plane_of_a_memory_is_saved_and_comes_back() -> None:
    def rank(comm: Comm) -> None:
        rig, again = Rig(comm, DGC), Rig(comm, DGC)
        _steps(rig, comm.rank, range(3))
        saved = _round_trip(state.save(rig.reducer))
        assert any(plane.any() for plane in saved["planes"]["momentum"].values())
        state.load(again.reducer, saved)
        for found, expected in zip(
            _steps(again, comm.rank, range(3, 6)), _steps(rig, comm.rank, range(3, 6)), strict=True
        ):
            assert torch.equal(found, expected)

    run_ranks(2, rank)


def test_in_another_world_every_plane_starts_with_its_mean() -> None:
    states = _saved(3, DGC, 2)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, DGC)
        state.load(rig.reducer, states)
        for name in rig.reducer.layout.slots:
            expected = torch.stack([old["planes"]["momentum"][name].view(-1) for old in states]).mean(0)
            assert torch.equal(rig.reducer.layout.memory(name, "momentum"), expected)

    run_ranks(2, rank)


def test_memory_in_bfloat16_is_saved_exactly() -> None:
    def rank(comm: Comm) -> None:
        rig, again = (Rig(comm, "topk(ratio=0.1)", memory_dtype=torch.bfloat16) for _ in range(2))
        _steps(rig, comm.rank, range(3))
        saved = _round_trip(state.save(rig.reducer))
        assert all(memory.dtype == torch.float32 for memory in saved["memory"].values())
        state.load(again.reducer, saved)
        assert all(torch.equal(again.memory[name], rig.memory[name]) for name in rig.memory)

    run_ranks(2, rank)


def test_memory_that_moves_to_another_kind_stands_for_the_same_gradient() -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)")
        _steps(rig, comm.rank, range(2))
        before, main = rig.memory, rig.reducer.layout.main
        filtered = replace(main, exchange=remember(gather(sparse(top_k(0.1))), LowPass(0.25)))
        rig.reducer.install(filtered)
        assert all(torch.equal(rig.memory[name], before[name] / 4) for name in before)
        rig.reducer.install(main)
        assert all(torch.equal(rig.memory[name], before[name]) for name in before)

    run_ranks(2, rank)


def test_a_state_whose_momentum_would_be_applied_twice_is_refused_and_nothing_is_changed() -> None:
    states = _saved(1, DGC, 2)

    def rank(comm: Comm) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(1))]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        rig = Rig(comm, "topk(ratio=0.1)", check=partial(check_momentum, optimizers=(optimizer,)))
        _steps(rig, 0, range(2))
        before, plan = rig.planes, rig.reducer.layout.main.text
        with pytest.raises(ValueError, match="applies momentum itself"):
            state.load(rig.reducer, states[0])
        assert rig.reducer.layout.main.text == plan
        assert rig.planes.keys() == before.keys()
        assert all(torch.equal(plane, before[each]) for each, plane in rig.planes.items())

    run_ranks(1, rank)


@pytest.mark.parametrize("is_open", [False, True])
def test_nothing_of_a_step_before_a_load_is_undone_or_counted_after_it(is_open: bool) -> None:
    """Its optimizer has not stepped when the state is loaded."""
    everything = frozenset(NAMES)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)")
        _steps(rig, comm.rank, range(2))
        saved = state.save(rig.reducer)
        rig.step(gradients(comm.rank, 2))
        if is_open:
            rig.reducer.catch_up(Fates(open=everything, made=False))
        state.load(rig.reducer, saved)
        before = rig.planes
        assert not rig.reducer.catch_up(Fates(dropped=everything, made=False)), "no step since"
        assert rig.reducer.step == 2
        rig.reducer.catch_up(Fates())
        assert rig.reducer.step == 2
        assert all(torch.equal(plane, before[each]) for each, plane in rig.planes.items())

    run_ranks(2, rank)


def test_a_state_that_has_no_place_under_another_policy_leaves_everything_as_it_was() -> None:
    states = _saved(1, "topk(ratio=0.1)", 2)

    def rank(comm: Comm) -> None:
        policy = {"first.*": "dense", "*.weight": "topk(ratio=0.1)", "*": "dense"}
        rig = Rig(comm, "topk(ratio=0.1)", policy=policy)
        _steps(rig, 0, range(2))
        before = rig.planes
        with pytest.raises(ValueError, match="keep the policy"):
            state.load(rig.reducer, states[0])
        assert rig.reducer.step == 2
        assert all(torch.equal(plane, before[each]) for each, plane in rig.planes.items())

    run_ranks(1, rank)


def test_a_measuring_run_loads_what_its_policy_has_a_place_for_and_refuses_the_rest() -> None:
    policy = {"first.weight": "topk(ratio=0.1)", "*": "dense"}

    def saved(comm: Comm) -> dict[str, Any]:
        rig = Rig(comm, "covap", policy=policy)
        _steps(rig, 0, range(2))
        return state.save(rig.reducer)

    (held,) = run_ranks(1, saved)
    assert held["plan"] is None
    assert held["memory"]["first.weight"].any()

    def rank(comm: Comm) -> None:
        again = Rig(comm, "covap", policy=policy)
        state.load(again.reducer, held)
        assert torch.equal(again.memory["first.weight"], held["memory"]["first.weight"].view(-1))
        with pytest.raises(ValueError, match="keep the policy"):
            state.load(Rig(comm, "covap").reducer, held)

    run_ranks(1, rank)


@pytest.mark.parametrize("text", ["dense", "fp16", "topk(ratio=0.1)"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_state_of_before_a_decision_is_taken_up_by_a_fixed_recipe(text: str, world: int) -> None:
    def undecided(comm: Comm) -> dict[str, Any]:
        rig = Rig(comm, "auto", alone=world == 1)
        rig.step(gradients(comm.rank, 0))
        return state.save(rig.reducer)

    states = run_ranks(world, undecided)
    assert states[0]["plan"] is None

    def rank(comm: Comm) -> tuple[str, int]:
        rig = Rig(comm, text)
        state.load(rig.reducer, states)
        errors = [rig.step(gradients(comm.rank, step)).error for step in range(1, 13)]
        assert not any(errors)
        return rig.reducer.running.split("(")[0], rig.reducer.step

    assert run_ranks(2, rank) == [(text.split("(")[0], 13)] * 2


class Unlucky:
    """A source's own part of the state, which rank 1 has no room for at first."""

    def __init__(self, rank: int) -> None:
        self.refusals = [MemoryError("no room for a copy")] * (rank == 1)

    def save_mean(self) -> dict[str, Any]:
        if self.refusals:
            raise self.refusals.pop()
        return {}


def test_a_rank_that_cannot_copy_its_memory_for_the_mean_is_named_on_all() -> None:
    def rank(comm: Comm) -> tuple[str, int]:
        rig = Rig(comm, "topk(ratio=0.1)", source_state=Unlucky(comm.rank))
        rig.step(gradients(comm.rank, 0))
        try:
            state.save_mean(rig.reducer)
        except (MemoryError, PeerFailed) as error:
            told = type(error).__name__
        return told, state.save_mean(rig.reducer)["step"]

    assert run_ranks(3, rank) == [("PeerFailed", 1), ("MemoryError", 1), ("PeerFailed", 1)]
