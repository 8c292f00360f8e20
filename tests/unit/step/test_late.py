"""A step that is committed when the next one begins leaves the same bits as one that is committed at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.errors import PeerFailed, TransportError
from gradwire.measure.metered import MeteredComm
from gradwire.placement import Placement
from gradwire.recipes import recipe
from gradwire.recipes.base import Watch
from gradwire.recipes.dense import dense
from gradwire.step.moods import Outcome
from tests.support.rig import Rig, flat, gradients
from tests.support.tiers import rest

RECIPES = (
    "topk(ratio=0.1)",
    "int8",
    "powersgd(rank=2)",
    "covap(interval=3)",
    "dgc",
    "efsignsgd",
    "dense",
    "fp16",
)
STEPS = 12
RUNS: dict[str, dict[int, int]] = {
    "none bad": {},
    "one bad": {4: 0},
    "three bad in a row": {4: 1, 5: 0, 6: 1},
    "the first and the last": {0: 0, STEPS - 1: 1},
}
"""In which steps a gradient is NaN, and on which rank of two."""


def brought(rank: int, step: int, bad: dict[int, int]) -> dict[str, Tensor]:
    """In every third step a parameter is idle; `bad` says where one is NaN."""
    grads = {name: values.clone() for name, values in gradients(rank, step).items()}
    if step % 3 == 2:
        grads["middle.weight"].zero_()
    if bad.get(step) == rank:
        grads["last.weight"][17] = torch.nan
    return grads


def bits(values: Tensor) -> list[int]:
    """NaN compares, too."""
    found: list[int] = values.view(torch.uint8).tolist()
    return found


@pytest.mark.parametrize("run", rest(RUNS, but=["three bad in a row"]))
@pytest.mark.parametrize("text", RECIPES)
def test_late_is_now(text: str, run: str) -> None:
    bad = RUNS[run]

    def rank(comm: Comm) -> None:
        now, late = Rig(comm, text, unit_elements=1500), Rig(comm, text, unit_elements=1500, commits="late")
        for step in range(STEPS):
            grads = brought(comm.rank, step, bad)
            expected, found = now.step(grads), late.step(grads)
            assert expected.error is None
            assert found.error is None
            assert found.step.outcome is Outcome.DEFERRED, "not known yet"
            assert bits(flat(found.mean)) == bits(flat(expected.mean))
            if step % 4 == 3:  # somebody asks between steps
                late.reducer.commit_deferred()
                assert found.step.outcome is expected.step.outcome
                same_memory(now, late)
        late.reducer.commit_deferred()
        same_memory(now, late)
        counted = STEPS - len(bad)
        assert now.reducer.step == counted

    run_ranks(2, rank)


def same_memory(now: Rig, late: Rig) -> None:
    """Planes, what exchanges keep, and the step's number."""
    assert late.reducer.step == now.reducer.step
    expected, found = now.planes, late.planes
    assert found.keys() == expected.keys()
    assert all(bits(found[key].reshape(-1)) == bits(expected[key].reshape(-1)) for key in expected)


def test_the_table_may_travel_over_a_comm_of_its_own() -> None:
    def rank(comm: Comm) -> list[int]:
        control = MeteredComm(comm)
        rig = Rig(comm, "int8", control=control, commits="late")
        good = rig.step(brought(comm.rank, 0, {})).step
        bad = rig.step(brought(comm.rank, 1, {1: 1})).step
        assert good.outcome is Outcome.COMMITTED
        assert bad.outcome is Outcome.DEFERRED
        rig.reducer.commit_deferred()
        assert bad.outcome is Outcome.NOT_FINITE
        assert good.sent.metered_bytes == good.sent.predicted_bytes
        assert rig.reducer.step == 1
        return [each.numel for each in control.rounds]

    first, *others = run_ranks(3, rank)
    assert len(first) == 2
    assert all(other == first for other in others)


def test_a_state_that_is_saved_between_steps_has_all_of_the_last_one() -> None:
    def rank(comm: Comm) -> None:
        now, late = Rig(comm, "topk(ratio=0.1)"), Rig(comm, "topk(ratio=0.1)", commits="late")
        for rig in (now, late):
            rig.step(brought(comm.rank, 0, {}))
        saved = [state.save(rig.reducer) for rig in (now, late)]
        assert saved[0]["step"] == saved[1]["step"] == 1
        same_memory(now, late)

    run_ranks(2, rank)


def test_a_state_that_is_loaded_replaces_what_is_deferred() -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)", commits="late")
        saved = state.save(rig.reducer)
        rig.step(brought(comm.rank, 0, {}))
        state.load(rig.reducer, saved)
        rig.reducer.commit_deferred()  # nothing is left of the step before
        assert rig.reducer.step == 0
        assert not any(values.any() for values in rig.memory.values())

    run_ranks(2, rank)


def test_a_failure_is_told_in_its_own_step() -> None:
    full = OSError("no room")

    def rank(comm: Comm) -> BaseException | None:
        rig = Rig(comm, "topk(ratio=0.1)", commits="late")
        rig.step(brought(comm.rank, 0, {}))
        if comm.rank == 0:

            def compensate(*_: object) -> None:
                raise full

            flat_buffer = rig.reducer.layout.flat_buffers[0]
            flat_buffer.compensate = flat_buffer.compensate_marked = compensate  # type: ignore[assignment,method-assign]
        outcome = rig.step(brought(comm.rank, 1, {}))
        assert rig.reducer.step == 1, "the step before counts, this one does not"
        return outcome.error

    own, other = run_ranks(2, rank)
    assert own is full
    assert isinstance(other, PeerFailed)


def test_a_device_that_fails_while_a_step_is_committed_ends_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost() -> Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Placement, "fetch", lambda _placement, _value: lost)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "int8", commits="late")
        assert rig.step(brought(comm.rank, 0, {})).step.outcome is Outcome.DEFERRED
        error = rig.step(brought(comm.rank, 1, {})).error
        assert isinstance(error, TransportError)
        assert "the device is gone" in str(error)

    run_ranks(1, rank)


def test_while_dense_steps_measure_each_is_committed_at_once() -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, "auto", commits="late")
        assert rig.reducer.measuring
        assert rig.step(brought(comm.rank, 0, {})).step.committed

    run_ranks(2, rank)


def test_one_rank_may_ask_by_itself_and_what_follows_waits_for_all() -> None:
    """A report commits the last step on the rank that prints it; to change what runs takes all ranks."""

    def rank(comm: Comm) -> tuple[str, float]:
        rig = Rig(comm, "topk(ratio=0.1)", commits="late")
        watch = Watch(lambda _watched: lambda _shown: dense(), every=1)
        rig.reducer.install(replace(recipe("topk(ratio=0.1)").build(), watch=watch))
        rig.step(brought(comm.rank, 0, {}))
        if comm.rank == 0:
            rig.reducer.commit_deferred()
            assert rig.reducer.step == 1
            assert not rig.reducer.is_caught_up, "something else is to run"
        comm.all_gather(torch.empty(comm.world, 1), torch.ones(1)).wait()  # of the user's
        left = sum(float(values.abs().sum()) for values in rig.memory.values())
        rig.step(brought(comm.rank, 1, {}))
        return rig.reducer.layout.main.text, left

    (first, left), (second, _deferred) = run_ranks(2, rank)
    assert left > 0.0, "what is unsent has to be sent first, which takes a collective"
    assert first == second == "local_every(interval=1)"
