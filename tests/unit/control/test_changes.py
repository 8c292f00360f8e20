"""In-process trials in which the link changes, or training suffers, on ranks that are threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.measure.clock import RoundTime, Trace
from gradwire.measure.link import LinkTraffic
from gradwire.planning.collectives import hops, serial_bytes
from gradwire.planning.costs import BackwardTiming, CodecCost, Line, Link, Network
from gradwire.planning.facts import Facts, StepObservation
from gradwire.planning.health import EVERY
from gradwire.planning.tuning import Tuning
from gradwire.recipes import Composition, recipe
from gradwire.recipes.base import Watch
from gradwire.step.event_log import EventLog
from gradwire.step.step import Step
from tests.support.rig import Rig, gradients, specs
from tests.support.tiers import rest

FAST, MIDDLING, SLOW = Link(1e-3, 1e-9), Link(1e-3, 2e-6), Link(1e-3, 1e-4)
CHANGED = 60


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> dict[str, Link]:
    """What the ranks' collectives find."""
    now = {"link": FAST}

    def seconds(verb: str, payload_bytes: float, world: int) -> float:
        here = now["link"]
        return hops(verb, world) * here.alpha_s + serial_bytes(verb, payload_bytes, world) * here.beta_s

    honest = LinkTraffic.note

    def note(traffic: LinkTraffic, _rounds: object) -> None:
        rest_s, tail_s = (seconds("all_reduce", size, 2) for size in (10_000, 100))
        rest = RoundTime("all_reduce", 10_000, 0.0, rest_s)
        honest(traffic, [rest, RoundTime("all_reduce", 100, rest_s, rest_s + tail_s)])

    monkeypatch.setattr(LinkTraffic, "note", note)
    # Far below what any choice takes on the slow link, where small ones gain more per byte.
    monkeypatch.setattr(Step, "lasted_s", lambda _step: 0.02)
    monkeypatch.setattr(Trace, "compress_s", property(lambda _trace: 0.002, lambda _trace, _s: None))
    return now


def _ratios(every: Callable[[int], None], steps: int) -> list[list[tuple[int, float]]]:
    """By rank, every ratio of `flexible` with its first step."""

    def rank(comm: Comm) -> list[tuple[int, float]]:
        rig, ratios = Rig(comm, "flexible"), list[tuple[int, float]]()
        for step in range(steps):
            every(step)
            outcome = rig.step(gradients(comm.rank, step))
            assert outcome.error is None
            ratio = recipe(outcome.step.recipe).options["ratio"]
            if not ratios or ratios[-1][1] != ratio:
                ratios.append((step, ratio))
        return ratios

    return run_ranks(2, rank)


def test_flexible_follows_a_link_that_changes_within_ten_steps_on_all_ranks(link: dict[str, Link]) -> None:
    def every(step: int) -> None:
        link["link"] = SLOW if step >= CHANGED else FAST

    first, second = _ratios(every, CHANGED + 25)
    assert first == second
    (_, before), (step, after) = first
    assert CHANGED < step <= CHANGED + 10
    assert after < before


SETTLED, SOON = 30, 40
"""Steps after which `auto` has long decided, and those that dense stays at least."""


@pytest.fixture
def training(link: dict[str, Link], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of a "backward" pass and of "sending" all of it densely; other steps take 1.1 passes."""
    takes = {"backward": 0.1, "sending": 0.05}

    def lasted_s(step: Step) -> float:
        backward_s = takes["backward"]
        return max(backward_s, takes["sending"]) if step.recipe == "dense" else 1.1 * backward_s

    def surveyed(facts: Facts, *_: object) -> Facts:
        numel = tuple(spec.numel for spec in specs())
        backward_s = takes["backward"]
        ready_s = tuple(backward_s * (number + 1) / len(numel) for number in range(len(numel)))
        backward = BackwardTiming(0.0, ready_s, numel, backward_s)
        return replace(facts, backward_s=backward_s, backward=backward, network=Network(link["link"]))

    codec = CodecCost(Line(1e-5, 0.0), Line(1e-5, 0.0))
    monkeypatch.setattr(Step, "lasted_s", lasted_s)
    monkeypatch.setattr("gradwire.control.warmup.surveyed", surveyed)
    monkeypatch.setattr("gradwire.control.auto.codec_cost", lambda *_, **_named: codec)
    return takes


def _plans(
    every: Callable[[int], None], steps: int, tuning: Tuning, resumes_at: int | None = None
) -> list[str | None]:
    """What `auto` runs by step, on all ranks; `None` while it measures."""

    def rank(comm: Comm) -> list[str | None]:
        rig, plans = Rig(comm, "auto", tuning=tuning), list[str | None]()
        for step in range(steps):
            every(step)
            if step == resumes_at:
                rig, before = Rig(comm, "auto", tuning=tuning), rig
                state.load(rig.reducer, state.save(before.reducer))
            plans.append(rig.reducer.running)
            assert rig.step(gradients(comm.rank, step)).error is None
        return plans

    first, second = run_ranks(2, rank)
    assert first == second
    return first


@pytest.mark.parametrize("resumes_at", rest([None, SETTLED], but=[SETTLED]), ids=["runs on", "resumes"])
@pytest.mark.parametrize("change", ["link", "backward"])
def test_dense_that_has_hidden_is_given_up_once_it_does_not(
    training: dict[str, float], link: dict[str, Link], change: str, resumes_at: int | None
) -> None:
    """A link that becomes slow, and computation that becomes fast."""

    def every(step: int) -> None:
        if step >= CHANGED and change == "link":
            link["link"], training["sending"] = SLOW, 2.0
        elif step >= CHANGED:
            training["backward"] = 0.01

    link["link"] = FAST if change == "link" else MIDDLING
    tuning = Tuning(kept_dense_steps=SOON)
    plans = _plans(every, CHANGED + 2 * SOON + SETTLED, tuning, resumes_at)
    assert plans[SETTLED:CHANGED] == (CHANGED - SETTLED) * ["dense"]
    again = plans.index(None, SETTLED)
    assert CHANGED < again <= SETTLED + SOON + 10
    assert plans[-1] not in (None, "dense")


def test_a_link_that_comes_and_goes_is_followed_without_flapping(
    training: dict[str, float], link: dict[str, Link]
) -> None:
    """Good, bad, good; on the way every change of the link is answered once."""
    long = SETTLED + 2 * SOON

    def every(step: int) -> None:
        is_bad = long <= step < 2 * long
        link["link"], training["sending"] = (SLOW, 2.0) if is_bad else (FAST, 0.05)

    plans = _plans(every, 4 * long, Tuning(kept_steps=SOON, kept_dense_steps=SOON))
    decided = [plans[step] for step in range(1, len(plans)) if plans[step - 1] is None and plans[step]]
    assert len(decided) == 3
    assert (decided[0], decided[2]) == ("dense", "dense")
    assert plans[2 * long - 1] == decided[1] != "dense"
    assert plans[-1] == "dense"


def test_judges_are_told_of_the_change_in_the_same_step(link: dict[str, Link]) -> None:
    def rank(comm: Comm) -> list[tuple[int, tuple[Link, Link]]]:
        told: list[tuple[int, tuple[Link, Link]]] = []

        def judge(shown: StepObservation) -> Composition | None:
            assert shown.step_change_s is None
            if shown.link_change is not None:
                told.append((shown.step, shown.link_change))
            return None

        rig = Rig(comm, "dense")
        built = recipe("topk(ratio=0.1)").build()
        rig.reducer.install(replace(built, watch=Watch(lambda _watched: judge, every=1)))
        for step in range(40):
            link["link"] = SLOW if step >= 20 else FAST
            rig.step(gradients(comm.rank, step))
        assert rig.reducer.link_changes[0][1].after == told[0][1][1]
        return told

    first, second = run_ranks(2, rank)
    assert first == second
    [(step, (before, after))] = first
    assert step <= 30
    assert after.beta_s > 100 * before.beta_s


def test_a_change_found_in_steps_that_do_not_count_is_told_with_the_next_that_counts(
    link: dict[str, Link],
) -> None:
    def rank(comm: Comm) -> list[tuple[int, bool]]:
        told: list[tuple[int, bool]] = []
        rig = Rig(comm, "dense")
        watch = Watch(
            lambda _: lambda shown: told.append((shown.step, shown.link_change is not None)), every=1
        )
        rig.reducer.install(replace(recipe("topk(ratio=0.1)").build(), watch=watch))
        for step in range(20):
            rig.step(gradients(comm.rank, step))
        link["link"] = SLOW
        spoilt = gradients(comm.rank, 20)
        spoilt["last.weight"][0] = torch.nan
        for _ in range(10):
            assert not rig.step(spoilt).step.committed
        assert rig.reducer.link_changes
        for step in (20, 21):
            rig.step(gradients(comm.rank, step))
        return told

    for told in run_ranks(2, rank):
        assert told == [*((step, False) for step in range(20)), (20, True), (21, False)]


def _growing(rank: int, step: int) -> dict[str, Tensor]:
    """Gradients that shrink much faster than what is unsent of them is sent."""
    return {name: grad * 0.96**step for name, grad in gradients(rank, step).items()}


@pytest.mark.parametrize("spoils", rest([False, True], but=[False]), ids=["", "in steps that do not count"])
def test_what_is_unsent_and_grows_is_told_once_to_judge_log_and_report(
    spoils: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where each step that looks for it is not finite at first: the next one that counts tells."""

    def rank(comm: Comm) -> list[str]:
        told: list[str] = []
        built = recipe("topk(ratio=0.001)").build()
        watch = Watch(lambda _: lambda shown: told.append(shown.unhealthy) if shown.unhealthy else None, 1)
        rig = Rig(comm, "dense")
        rig.reducer.install(replace(built, watch=watch))
        for step in range(8 * EVERY + 2):
            if spoils and step % EVERY == 0:
                spoilt = _growing(comm.rank, step)
                spoilt["last.weight"][0] = torch.nan
                assert not rig.step(spoilt).step.committed
            rig.step(_growing(comm.rank, step))
        [(step, sign)] = rig.reducer.health.complaints
        assert step % EVERY == 0
        assert told == [sign]
        event_log = EventLog(rig.reducer)
        event_log.unhealthy()
        assert rig.reducer.health.told == 1
        return told

    with caplog.at_level(logging.WARNING, "gradwire"):
        first, second = run_ranks(2, rank)
    assert first == second
    assert first[0].startswith("what is unsent has grown from ")
    assert len(caplog.messages) == 1, "rank 0 alone speaks"


def test_what_a_composition_warns_of_is_logged_by_rank_0_alone(caplog: pytest.LogCaptureFixture) -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, "dense")
        rig.reducer.install(replace(recipe("topk").build(), warning="gradients get stale"))
        rig.step(gradients(comm.rank, 0))
        EventLog(rig.reducer).changed()

    with caplog.at_level(logging.WARNING, "gradwire"):
        run_ranks(3, rank)
    assert caplog.messages == ["gradients get stale"]


def test_losses_that_rise_on_the_mean_of_all_ranks_are_told_where_something_is_remembered() -> None:
    def rank(comm: Comm) -> list[tuple[int, str]]:
        rig = Rig(comm, "topk(ratio=0.1)")
        for step in range(12 * EVERY + 2):
            rig.reducer.health.note(1.0 + comm.rank + (step > 9 * EVERY) * 3.0 + 0.1 * (step % 2))
            rig.step(gradients(comm.rank, step % 4))
        return rig.reducer.health.complaints

    first, second = run_ranks(2, rank)
    assert first == second
    [(step, sign)] = first
    assert step == 11 * EVERY
    assert sign == "the loss has risen from 1.548 to 4.55"


def test_healthy_steps_say_nothing_and_weigh_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of all main flat buffers of all ranks."""
    weighed: list[tuple[float, float]] = []
    monkeypatch.setattr("gradwire.planning.health.Lag.add", lambda _lag, *norms: weighed.append(norms) or "")

    def rank(comm: Comm) -> tuple[float, float]:
        rig = Rig(comm, "topk(ratio=0.1)")
        for step in range(EVERY - 1):
            rig.step(gradients(comm.rank, step % 4))
        unsent = rig.memory
        fresh = gradients(comm.rank, 7)
        for _ in range(2):
            rig.step(fresh)
        assert rig.reducer.health.complaints == []
        return (
            sum(float(fresh[name].double().square().sum()) for name in unsent),
            sum(float(each.double().square().sum()) for each in unsent.values()),
        )

    ranks = run_ranks(2, rank)
    expected = torch.tensor(ranks).sum(0).sqrt()
    # Sums of some thousand squares, and x − unsent, in float32.
    assert torch.tensor(weighed[0]) == pytest.approx(expected, rel=1e-4)
    assert weighed[0] == weighed[1]


def test_a_step_that_is_tried_again_tells_its_health_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, float]] = []
    monkeypatch.setattr("gradwire.planning.health.Lag.add", lambda _lag, *norms: told.append(norms) or "")

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)")
        for step in range(EVERY):
            rig.step(gradients(comm.rank, step % 4))
        spoilt = gradients(comm.rank, 0)
        spoilt["last.weight"][0] = torch.nan
        assert not rig.step(spoilt).step.committed
        rig.step(gradients(comm.rank, 0))

    run_ranks(2, rank)
    assert [fresh > 0.0 for fresh, _unsent in told] == [True, True, False, False]
