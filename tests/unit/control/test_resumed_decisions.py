"""A resumed run decides as one that never stopped, in the same step, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch import Tensor

from gradwire._api.switch import switch
from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.errors import RanksDisagree
from gradwire.planning.costs import CodecCost, Line
from gradwire.planning.health import EVERY
from gradwire.planning.tuning import USUAL, Tuning
from gradwire.step.step import Step
from gradwire.unit.context import Fates
from tests.support.rig import Rig, gradients
from tests.support.tiers import rest

RISES = 9 * EVERY
FOUND = 11 * EVERY
SOME = "topk(ratio=0.1)"
"""The trend of losses needs memory."""


Told = tuple[list[str | None], list[tuple[int, str]]]


def _loss(_rank: int, step: int) -> float:
    return 1.0 + (step > RISES) * 3.0 + 0.1 * (step % 2) + 0.01 * (step // EVERY % 3)


def _steady(rank: int, step: int) -> dict[str, Tensor]:
    return gradients(rank, step % 4)


def _shrinking(rank: int, step: int) -> dict[str, Tensor]:
    """Gradients that shrink much faster than what is unsent of them is sent."""
    return {name: grad * 0.96**step for name, grad in gradients(rank, step).items()}


def _own(rig: Rig, comm: Comm) -> state.Saved:
    return state.save(rig.reducer)


def _mean(rig: Rig, comm: Comm) -> state.Saved:
    return state.save_mean(rig.reducer)


def _run(
    text: str,
    steps: int,
    at: int | None = None,
    *,
    begins_with: str | None = None,
    save: Callable[[Rig, Comm], state.Saved] = _own,
    loss: Callable[[int, int], float] = _loss,
    gradient: Callable[[int, int], dict[str, Tensor]] = _steady,
    tuning: Tuning = USUAL,
) -> Told:
    """The recipe that runs in each of the steps, and the signs found. The run stops and resumes before step
    `at`. It may begin with the decision for another recipe.
    """

    def rank(comm: Comm) -> Told:
        rig, plans = Rig(comm, text, tuning=tuning), list[str | None]()
        if begins_with is not None:
            state.load(rig.reducer, state.save(Rig(comm, begins_with).reducer))
        for step in range(steps):
            if step == at:
                saved = save(rig, comm)
                rig = Rig(comm, text, tuning=tuning)
                state.load(rig.reducer, saved)
            assert rig.step(gradient(comm.rank, step)).error is None
            plans.append(rig.reducer.running)
            rig.reducer.health.note(loss(comm.rank, step))
        return plans, rig.reducer.health.complaints

    first, second = run_ranks(2, rank)
    assert first == second
    return first


@pytest.fixture(scope="module")
def losses_rose() -> Told:
    return _run(SOME, FOUND + 2)


@pytest.mark.parametrize("save", rest([_own, _mean], but=[_own]))
@pytest.mark.parametrize(
    "at",
    rest([5 * EVERY, RISES + 7, FOUND - EVERY + 1, FOUND, FOUND + 1], but=[RISES + 7, FOUND - EVERY + 1]),
)
def test_losses_that_rise_are_found_in_the_same_step(
    losses_rose: Told, at: int, save: Callable[[Rig, Comm], state.Saved]
) -> None:
    [(step, sign)] = losses_rose[1]
    assert step == FOUND
    assert sign.startswith("the loss has risen from 1.0")
    assert _run(SOME, FOUND + 2, at, save=save) == losses_rose


@pytest.mark.parametrize("at", rest([5 * EVERY, RISES + 7], but=[RISES + 7]))
@pytest.mark.parametrize("world", [1, 3])
def test_losses_that_rise_are_found_in_the_same_step_in_another_world(
    losses_rose: Told, at: int, world: int
) -> None:
    def before(comm: Comm) -> state.State:
        rig = Rig(comm, SOME)
        for step in range(at):
            rig.step(_steady(comm.rank, step))
            rig.reducer.health.note(_loss(comm.rank, step))
        return state.save(rig.reducer)

    saved = run_ranks(2, before)

    def after(comm: Comm) -> list[tuple[int, str]]:
        rig = Rig(comm, SOME)
        state.load(rig.reducer, saved)
        for step in range(at, FOUND + 2):
            rig.step(_steady(comm.rank, step))
            rig.reducer.health.note(_loss(comm.rank, step))
        return rig.reducer.health.complaints

    assert run_ranks(world, after) == world * [losses_rose[1]]


@pytest.mark.parametrize("at", rest([3 * EVERY, 3 * EVERY + 1, 4 * EVERY + 1], but=[3 * EVERY + 1]))
def test_what_is_unsent_and_grows_is_found_in_the_same_step(at: int) -> None:
    text, steps = "topk(ratio=0.001)", 8 * EVERY + 2
    expected = _run(text, steps, gradient=_shrinking)
    [(step, sign)] = expected[1]
    assert step == 5 * EVERY
    assert sign.startswith("what is unsent has grown")
    assert _run(text, steps, at, gradient=_shrinking) == expected


@pytest.mark.rest
def test_a_sign_is_told_once_for_each_recipe_even_if_the_run_resumes() -> None:
    def loss(_rank: int, step: int) -> float:
        return _loss(0, step) + (step > RISES + 6 * EVERY) * 3.0

    steps = RISES + 10 * EVERY
    expected = _run(SOME, steps, loss=loss)
    assert len(expected[1]) == 1
    assert _run(SOME, steps, FOUND + 40, loss=loss) == expected


AUTO = "auto(late=100.0)"
"""Whatever top-k leaves late is within its limit."""
SOON = Tuning(kept_dense_steps=10)


@pytest.fixture(scope="module")
def codecs() -> Iterator[None]:
    """Codecs that need not be timed."""
    cost = CodecCost(Line(1e-5, 0.0), Line(1e-5, 0.0))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gradwire.control.auto.codec_cost", lambda *_, **_named: cost)
        yield


@pytest.fixture(scope="module")
def went_back(codecs: None) -> Told:
    return _run(AUTO, FOUND + 4, begins_with=SOME)


@pytest.mark.parametrize("at", rest([5 * EVERY, FOUND, FOUND + 1, FOUND + 2, FOUND + 3], but=[FOUND + 1]))
def test_auto_goes_back_to_dense_in_the_same_step(went_back: Told, at: int) -> None:
    """It has decided before the step `FOUND + 1`, and what is unsent is sent in that step."""
    plans, [(step, _sign)] = went_back
    assert step == FOUND
    assert plans[FOUND] == plans[0] != "dense"
    assert plans[FOUND + 1] == "local_every(interval=1)"
    assert plans[FOUND + 2 :] == ["dense", "dense"]
    assert _run(AUTO, FOUND + 4, at, begins_with=SOME) == went_back


@pytest.mark.parametrize("at", rest([FOUND + 1, FOUND + 2, FOUND + 3], but=[FOUND + 2]))
def test_auto_that_went_back_to_dense_stays_there(
    codecs: None, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Steps become much longer, which is a reason to choose again where training has not suffered."""
    steps = FOUND + 80
    monkeypatch.setattr(Step, "lasted_s", lambda step: 0.1 if step.number > steps - 40 else 0.01)
    plans, _ = _run(AUTO, steps, at, begins_with=SOME, tuning=SOON)
    assert set(plans[FOUND + 2 :]) == {"dense"}


@pytest.mark.parametrize("at", [2, 30])
def test_a_recipe_that_the_user_named_stays_under_auto(
    codecs: None, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(Step, "lasted_s", lambda step: 0.1 if step.number > 40 else 0.01)

    def rank(comm: Comm) -> list[str | None]:
        rig, plans = Rig(comm, AUTO, tuning=SOON), list[str | None]()
        switch(rig.reducer, "dense", lambda _layout: None)
        for step in range(80):
            if step == at:
                saved = state.save(rig.reducer)
                rig = Rig(comm, AUTO, tuning=SOON)
                state.load(rig.reducer, saved)
            assert rig.step(gradients(comm.rank, step % 4)).error is None
            plans.append(rig.reducer.running)
        return plans

    assert run_ranks(2, rank) == 2 * [80 * ["dense"]]


LIMITED = "auto(late=0.1)"
LATE = 4 * EVERY
"""The step in which the fourth look at top-k shows that more is late than `LIMITED` allows."""


@pytest.fixture(scope="module")
def was_late(codecs: None) -> Told:
    return _run(LIMITED, LATE + 4, begins_with=SOME)


@pytest.mark.parametrize("at", rest([EVERY, LATE - 5, LATE, LATE + 1], but=[LATE]))
def test_a_recipe_that_leaves_too_much_late_is_given_up_in_the_same_step(was_late: Told, at: int) -> None:
    plans, _ = was_late
    assert plans[LATE] == plans[0] != plans[LATE + 1]
    assert plans[-1] is None, "everything is measured again"
    assert _run(LIMITED, LATE + 4, at, begins_with=SOME) == was_late


def _with_discarded(rig: Rig, comm: Comm) -> state.Saved:
    """A state as older versions wrote it: with norms of discarded gradient."""
    saved = state.save(rig.reducer)
    lateness, noted = saved["health"]["composition"]["lateness"], saved["noted"]
    step, fresh, unsent, *latest = noted["weighed"]
    noted["weighed"] = [step, fresh, unsent, 0.5 * unsent, *latest]
    lateness["begun"] = [[fresh, unsent, 0.5 * unsent] for fresh, unsent in lateness["begun"]]
    lateness["error"] = [0.5 * late for late in lateness["late"]]
    return saved


def test_norms_of_discarded_gradient_in_an_older_state_decide_nothing(was_late: Told) -> None:
    assert _run(LIMITED, LATE + 4, LATE, begins_with=SOME, save=_with_discarded) == was_late


@pytest.mark.parametrize("save", [_own, _with_discarded])
def test_a_cycle_that_has_begun_is_measured_to_its_end(save: Callable[[Rig, Comm], state.Saved]) -> None:
    """Units take turns over two steps. The first is told, and the second waits to be."""

    def rank(comm: Comm) -> list[float | None]:
        text, late = "covap(interval=2, init_value=0.5, ascend_steps=100, ascend_range=0.1)", []
        for at in (None, EVERY):
            rig = Rig(comm, text)
            for step in range(2 * EVERY + 1):
                if step == at:
                    saved, before = save(rig, comm), state.save(rig.reducer)
                    assert len(before["health"]["composition"]["lateness"]["begun"]) == 1
                    rig = Rig(comm, text)
                    state.load(rig.reducer, saved)
                    after = state.save(rig.reducer)
                    assert all(after[key] == before[key] for key in ("health", "noted"))
                assert rig.step(_steady(comm.rank, step)).error is None
            rig.reducer.catch_up(Fates())
            late.append(rig.reducer.late)
        return late

    for through, resumed in run_ranks(2, rank):
        assert through is not None
        assert resumed == through


def test_a_state_without_any_of_it_is_loaded_as_before() -> None:
    def older(rig: Rig, comm: Comm) -> state.Saved:
        saved = state.save(rig.reducer)
        for key in ("health", "noted", "stays", "following"):
            del saved[key]
        return saved

    plans, signs = _run(SOME, FOUND + 2, FOUND + 1, save=older)
    assert set(plans) == {plans[0]}
    assert signs == []


def test_a_run_that_goes_back_forgets_the_signs_found_since() -> None:
    def rank(comm: Comm) -> list[tuple[int, str]]:
        rig = Rig(comm, SOME)
        saved = state.save(rig.reducer)
        for step in range(FOUND + 1):
            rig.step(_steady(comm.rank, step))
            rig.reducer.health.note(_loss(comm.rank, step))
        assert len(rig.reducer.health.complaints) == 1
        state.load(rig.reducer, saved)
        return rig.reducer.health.complaints

    assert run_ranks(2, rank) == [[], []]


def test_ranks_that_would_judge_differently_disagree() -> None:
    def rank(comm: Comm) -> str:
        rig = Rig(comm, SOME)
        rig.step(_steady(comm.rank, 0))
        saved = state.save(rig.reducer)
        if comm.rank == 1:
            saved["health"]["losses"]["last"] = 1.0
        with pytest.raises(RanksDisagree) as refused:
            state.load(rig.reducer, saved)
        return str(refused.value)

    for told in run_ranks(2, rank):
        assert "health" in told
