"""mergecomp: every way to cut, and searches that end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.planning.boundaries import Boundaries, element_boundaries, even_groups, layer_wise
from gradwire.planning.costs import BackwardTiming, CodecCost, Line, Link, Network
from gradwire.planning.facts import Facts, StepObservation, Watched
from gradwire.planning.merge import seconds_of
from gradwire.planning.merge_worker import moved_boundaries, worker_boundaries
from gradwire.recipes import Composition, recipe
from gradwire.recipes.mergecomp import cost_of, dearer, ready_times, sending
from tests.support.looped import looped
from tests.support.planning_problems import step_seconds
from tests.support.rig import SHAPES, Rig, gradients

SIZES = (100, 200, 50, 400, 150, 100)
INNER = "topk(ratio=0.1)"
EVERY_GROUPING = [tuple(k + 1 for k in range(5) if mask >> k & 1) for mask in range(32)]


def _built(options: str) -> Composition:
    return recipe(f"mergecomp(inner={INNER!r}, {options})").build()


@looped(
    ("options", "boundaries"),
    [
        ("split='layers'", (100, 300, 350, 750, 900)),
        ("split='even', groups=2", (350,)),
        ("split='even', groups=3", (300, 750)),
        ("split='timed'", ()),
        ("cuts=(300, 900), elements=1000", (300, 900)),
        ("cuts=(300, 900), elements=999", ()),
    ],
)
def test_boundaries(options: str, boundaries: Sequence[int]) -> None:
    composition = _built(options)
    assert tuple(composition.cutter(SIZES)) == tuple(boundaries)
    inner = recipe(INNER).build()
    assert composition.exchange == inner.exchange
    assert _built(options).text == composition.text


def test_what_remembers_nothing_is_grouped_all_the_same() -> None:
    def rank(comm: Comm) -> Tensor:
        rig = Rig(comm, "mergecomp(inner='dense', split='layers')")
        return rig.step(gradients(comm.rank, 0)).flat()

    def plain(comm: Comm) -> Tensor:
        return Rig(comm, "dense").step(gradients(comm.rank, 0)).flat()

    assert torch.equal(run_ranks(2, rank)[0], run_ranks(2, plain)[0])


def _facts(per_call_s: float) -> Facts:
    """Ready one after the other; two parameters that travel densely lie between."""
    numel = (7, *SIZES[:3], 7, *SIZES[3:])
    ready_s = tuple(0.01 * (number + 1) for number in range(len(numel)))
    backward = BackwardTiming(0.1, ready_s, numel, ready_s[-1])
    codec = CodecCost(Line(per_call_s, 1e-7), Line(per_call_s, 1e-7))
    network = Network(Link(alpha_s=1e-4, beta_s=8 / 1e6))
    return Facts(ready_s[-1], 0.2, 4, backward, network, codec, payloads=4.0)


def _planned(options: str, facts: Facts) -> Composition:
    decision = recipe(f"mergecomp(inner={INNER!r}, {options})").build().next
    assert decision is not None
    first = decision.decide(facts)
    assert first.watch is not None
    assert tuple(first.cutter(SIZES)) == ()
    judge = first.watch.judge(Watched(4, SIZES))
    # Steps that all take as long: who is tried last is what the measured costs say, and one group stays.
    seen = [found for step in range(30) if (found := judge(StepObservation(step, 1.0, 0.0))) is not None]
    found = next((each for each in reversed(seen) if each.watch is not None), seen[0])
    for each in seen:
        again = recipe(each.text).build()
        # What is tried is loaded again as one group, what is decided as it is.
        assert tuple(again.cutter(SIZES)) == (() if each.watch else tuple(each.cutter(SIZES)))
    return found


def _grouping(found: Composition) -> Boundaries:
    """Its boundaries, counted in tensors."""
    return next(
        boundaries
        for boundaries in EVERY_GROUPING
        if element_boundaries(boundaries, SIZES) == tuple(found.cutter(SIZES))
    )


@looped("per_call_s", [1e-6, 1e-3, 1.0])
def test_planned_boundaries_are_never_worse_beside_backward_than_those_of_the_papers_model(
    per_call_s: float,
) -> None:
    facts = _facts(per_call_s)
    found = _planned("split='planned'", facts)
    seconds = seconds_of(ready_times(facts, SIZES), cost_of(found.exchange, facts, Watched(4, SIZES)))
    took_s = {boundaries: seconds(boundaries) for boundaries in EVERY_GROUPING}
    chosen = took_s[_grouping(found)]
    assert chosen <= took_s[_grouping(_planned("split='exact'", facts))]
    assert chosen <= min(
        took_s[boundaries] for boundaries in (layer_wise(6), *(even_groups(6, k) for k in (1, 2, 3, 4)))
    )
    # Six tensors are few enough for a search that moves cuts to find the best of all.
    assert chosen == pytest.approx(min(took_s.values()), rel=1e-12)


def test_everybodys_payload_is_decoded_and_ones_own_encoded() -> None:
    """An all-gather brings four ranks' payloads, and each costs a decode."""
    cost = cost_of(_built("split='layers'").exchange, _facts(2e-3), Watched(4, SIZES))
    assert (cost.encode, cost.decode) == (Line(2e-3, 1e-7), Line(8e-3, 4e-7))


@looped("per_call_s", [1e-6, 1e-3, 1.0])
def test_exact_boundaries_are_the_best_of_all(per_call_s: float) -> None:
    facts = _facts(per_call_s)
    found = _planned("split='exact'", facts)
    backward = ready_times(facts, SIZES)
    cost = cost_of(found.exchange, facts, Watched(4, SIZES))
    best = min(step_seconds(backward, boundaries, cost) for boundaries in EVERY_GROUPING)
    chosen = _grouping(found)
    assert step_seconds(backward, chosen, cost) == pytest.approx(best, rel=1e-12)
    if per_call_s == 1.0:
        assert chosen == (), "a call costs more than anything that overlap could hide"


def test_the_wire_is_that_of_steps_behind_the_warm_up_which_do_not_rest() -> None:
    network = _facts(1e-6).network
    assert network is not None
    for warming, settled in (
        ("powersgd(warmup_steps=100)", "powersgd(warmup_steps=0)"),
        ("scalecom(warmup_steps=100)", "scalecom(warmup_steps=0)"),
    ):
        ours, plain = (recipe(text).build() for text in (warming, settled))
        assert sending(ours.exchange, network, 4) == sending(plain.exchange, network, 4)
    resting = recipe("local_every(interval=8)").build()
    assert sending(resting.exchange, network, 4).slope_s > 0.0


@looped("options", ["cuts=(5,)", "cuts=(5,), elements=0"])
def test_cuts_without_what_they_were_made_for_are_refused(options: str) -> None:
    with pytest.raises(ValueError, match="cuts need elements"):
        recipe(f"mergecomp(inner={INNER!r}, {options})").build()


def test_the_papers_search_makes_two_groups() -> None:
    assert len(_planned("split='search', groups=2", _facts(1e-6)).cutter(SIZES)) == 1


def test_a_group_is_ready_when_all_before_it_are() -> None:
    facts = Facts(1.0, 1.0, 2, BackwardTiming(0.0, (0.3, 0.1, 0.5), (10, 20, 30), 0.5))
    assert ready_times(facts, (10, 20)).ready_s == (0.3, 0.3)
    assert ready_times(facts, (20, 30)).ready_s == (0.1, 0.5)


def test_what_is_planned_follows_from_facts_that_all_ranks_share() -> None:
    def rank(comm: Comm) -> list[tuple[str, str]]:
        rig = Rig(comm, f"mergecomp(inner={INNER!r})")
        for step in range(32):
            assert rig.step(gradients(comm.rank, step)).error is None
        return [(rig.reducer.layout.main.text, rig.reducer.layout.main.why)]

    ranks = run_ranks(3, rank)
    assert ranks[0] == ranks[1] == ranks[2]
    [(text, why)] = ranks[0]
    assert "cuts=" in text
    assert "by the measured costs" in why or "when timed" in why


@looped("split", ["planned", "exact", "search", "timed"])
def test_alone_there_is_no_link_to_plan_for_and_training_goes_on(split: str) -> None:
    def rank(comm: Comm) -> list[bool]:
        rig = Rig(comm, f"mergecomp(inner={INNER!r}, split={split!r})")
        return [rig.step(gradients(comm.rank, step)).error is None for step in range(8)]

    assert run_ranks(1, rank) == [[True] * 8]


@looped("split", ["planned", "exact", "search", "timed"])
def test_without_a_tensor_to_group_training_goes_on(split: str) -> None:
    def rank(comm: Comm) -> list[bool]:
        text = f"mergecomp(inner={INNER!r}, split={split!r})"
        rig = Rig(comm, text, policy=lambda _spec: "dense")
        return [rig.step(gradients(comm.rank, step)).error is None for step in range(12)]

    assert run_ranks(2, rank) == [[True] * 12] * 2


def test_what_runs_in_any_step_can_be_loaded_again() -> None:
    def rank(comm: Comm) -> list[str]:
        rig = Rig(comm, f"mergecomp(inner={INNER!r})")
        texts = []
        for step in range(32):
            rig.step(gradients(comm.rank, step))
            watch = rig.reducer.layout.main.watch
            assert rig.reducer.measuring or "cuts=(" in rig.reducer.layout.main.text or watch.ends
            if not rig.reducer.measuring:
                texts.append(rig.reducer.layout.main.text)
        return texts

    texts = run_ranks(2, rank)[0]
    assert len(set(texts)) == 2, "one group while others are tried, and which of them was faster"
    assert all(isinstance(recipe(text).build(), Composition) for text in texts)


@pytest.mark.parametrize("kind", [MemoryError, SystemExit])
def test_a_codec_that_one_rank_cannot_measure_is_planned_for_on_none(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = count()

    def fails_once(*_: object) -> CodecCost:
        if next(asked) == 0:
            raise kind("no room")
        return CodecCost(Line(1e-5, 1e-9), Line(1e-5, 1e-9))

    monkeypatch.setattr("gradwire.control.warmup.codec_cost", fails_once)

    def rank(comm: Comm) -> str:
        rig = Rig(comm, f"mergecomp(inner={INNER!r})")
        for step in range(8):
            assert rig.step(gradients(comm.rank, step)).error is None
        return rig.reducer.layout.main.why

    assert all("one group" in why for why in run_ranks(2, rank))
    assert f"could not be measured: {kind.__name__}" in caplog.text


def test_timing_real_steps_ends_with_boundaries_that_are_written_down() -> None:
    def rank(comm: Comm) -> list[str]:
        rig = Rig(comm, f"mergecomp(inner={INNER!r}, split='timed')")
        texts = []
        for step in range(30):
            outcome = rig.step(gradients(comm.rank, step))
            assert outcome.error is None
            texts.append(rig.reducer.layout.main.text)
        return texts

    ranks = run_ranks(3, rank)
    assert ranks[0] == ranks[1] == ranks[2]
    assert "split='timed'" in ranks[0][0]
    assert "split='timed'" in ranks[0][-1], "the text says what was asked for"
    assert "cuts=(" in ranks[0][-1]
    assert isinstance(recipe(ranks[0][-1]).build(), Composition)


def test_how_long_a_search_takes_is_said_before_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gradwire")
    built = _built("split='timed', groups=3, steps=200, alpha=0.01")
    assert built.why == "timing groupings for at most 200 steps"
    assert built.watch is not None
    judge = built.watch.judge(Watched(4, 40 * (10,)))
    told = "176 steps at most, in which 4 neighbouring tensors stay together"
    assert caplog.messages == [f"mergecomp times groupings of 40 tensors: {told}"]
    found = [found for step in range(8) if (found := judge(StepObservation(step, 1.0, 0.0)))]
    assert found[0].why == f"timing 2 groups; the search takes {told}"
    assert found[0].text == built.text


@looped("split", ["search", "timed"])
@looped(("alpha", "groups"), [(0.0, 3), (0.9, 2)])
def test_a_group_more_must_gain_alpha_to_go_on(split: str, alpha: float, groups: int) -> None:
    if split == "search":
        found = _planned(f"split='search', groups=3, alpha={alpha}", _facts(1e-6))
    else:
        watch = _built(f"split='timed', groups=3, alpha={alpha}").watch
        assert watch is not None
        judge, boundaries = watch.judge(Watched(4, SIZES)), Boundaries()
        for step in range(50):
            judged = judge(StepObservation(step, 1.0 - 0.1 * len(boundaries), 0.0))
            if judged is not None:
                found, boundaries = judged, tuple(judged.cutter(SIZES))
            if judged is not None and judged.watch is None:
                break
    assert len(found.cutter(SIZES)) + 1 == groups


@looped("tensors", [60, 105, 161])
def test_timing_real_steps_is_over_before_the_hundredth_and_then_the_boundaries_stay(tensors: int) -> None:
    watch, sizes = _built("split='timed'").watch, tensors * (10,)
    assert watch is not None
    judge, previous_s = watch.judge(Watched(4, sizes)), 0.0
    for step in range(100):
        found = judge(StepObservation(step, previous_s, 0.0))
        if found is not None and found.watch is None:
            break
        if found is not None:
            trial = found.cutter(sizes)[0]
        previous_s = 0.0 if found else 1.0 if step < 5 else 0.5 + abs(trial / 10 - tensors // 3) / tensors
    assert step < 100
    assert found is not None
    assert found.watch is None, "nothing judges any more"
    assert tuple(found.cutter(sizes)) == (10 * (tensors // 3),)


def test_calls_that_are_dear_beside_a_training_are_fewer() -> None:
    cost = cost_of(_built("split='layers'").exchange, _facts(2e-3), Watched(4, SIZES))
    assert dearer(cost).encode == Line(2e-2, 1e-7)
    assert dearer(cost).communicate == cost.communicate
    backward = ready_times(_facts(2e-3), SIZES)
    assert len(moved_boundaries(backward, dearer(cost), worker_boundaries(backward, cost))) < len(
        worker_boundaries(backward, cost)
    )


@looped(("planned_s", "groups"), [(0.9, "groups"), (1.1, "1 group")])
def test_what_was_planned_has_to_beat_one_group_on_real_steps(planned_s: float, groups: str) -> None:
    decision = recipe(f"mergecomp(inner={INNER!r})").build().next
    assert decision is not None
    running = decision.decide(_facts(1e-6))
    assert running.watch is not None
    judge, began = running.watch.judge(Watched(4, SIZES)), 0
    for step in range(40):
        previous_s = 0.0 if step == began else planned_s if running.cutter(SIZES) else 1.0
        found = judge(StepObservation(step, previous_s, 0.0))
        if found is not None:
            running, began = found, step + 1
        if running.watch is None:
            break
    assert running.watch is None, "nothing judges any more"
    assert bool(running.cutter(SIZES)) == (groups == "groups")
    assert groups in running.why


@looped(
    ("text", "message"),
    [
        ("mergecomp(inner='auto')", "must measure before it can decide"),
        ("mergecomp(inner='topkk')", "topk"),
        ("mergecomp(split='odd')", "planned"),
        ("mergecomp(groups=0)", "at least one"),
        ("mergecomp(alpha=-0.1)", "alpha"),
        ("mergecomp(split='timed', steps=5)", "steps=5"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(text)


def test_a_group_s_scale_is_that_of_one_tensor() -> None:
    """Algorithm 1 with EFSignSGD: a group is sent as its signs times its mean magnitude, with a memory."""
    world, steps, groups = 2, 4, (("last.weight", "middle.weight"), ("first.weight",))
    text = "mergecomp(inner='efsignsgd', cuts=(4946,), elements=7203, scales='group')"

    def rank(comm: Comm) -> list[dict[str, Tensor]]:
        rig = Rig(comm, text)
        return [rig.step(gradients(comm.rank, step)).mean for step in range(steps)]

    first, second = run_ranks(world, rank)
    unsent = [
        {name: torch.zeros(SHAPES[name]).flatten() for group in groups for name in group}
        for _ in range(world)
    ]
    for step in range(steps):
        for group in groups:
            sent = []
            for rank_, memory in enumerate(unsent):
                x = torch.cat([memory[name] + gradients(rank_, step)[name].flatten() for name in group])
                sent.append(torch.where(x >= 0, 1.0, -1.0) * x.abs().mean())
                left = (x - sent[-1]).split([memory[name].numel() for name in group])
                memory.update(zip(group, left, strict=True))
            mean = torch.stack(sent).mean(0)
            for name, expected in zip(
                group, mean.split([memory[name].numel() for name in group]), strict=True
            ):
                assert torch.equal(first[step][name], second[step][name])
                torch.testing.assert_close(first[step][name].flatten(), expected, rtol=1e-5, atol=1e-6)


def test_what_has_no_scales_is_refused_as_a_group_s() -> None:
    with pytest.raises(ValueError, match="scales='group' is for inner=efsignsgd"):
        recipe("mergecomp(inner='topk', scales='group')").build()
    with pytest.raises(ValueError, match="scales='unit' is none of parameter, group"):
        recipe("mergecomp(inner='efsignsgd', scales='unit')").build()
