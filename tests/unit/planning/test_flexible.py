"""The controller of ratio and collective, in worlds of known links and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from gradwire.comm.base import Round
from gradwire.measure.clock import RoundTime
from gradwire.measure.link import LinkTraffic
from gradwire.planning.boundaries import one_unit
from gradwire.planning.change_detection import StepWatch
from gradwire.planning.collectives import time_of, total_time
from gradwire.planning.costs import Link, Network
from gradwire.planning.facts import StepObservation, Watched
from gradwire.planning.flexible import LEAD, WAYS, Choice, Flexible, Rule, Trigger
from gradwire.planning.ratio import ALL_GATHER, RING, TREE, RatioCandidate, candidate_ratios
from gradwire.recipes.flexible import rounds_of
from tests.support.looped import looped
from tests.support.planning_problems import best_ratio

NUMEL, WORLD = 10_000_000, 8
RATIOS = candidate_ratios()
ROUNDS = {ranks: rounds_of(Watched(ranks, (NUMEL,)), one_unit) for ranks in (2, 4, WORLD, 32)}
FAST = Link(alpha_s=1e-4, beta_s=8 / 25e9)
SLOW = Link(alpha_s=1e-4, beta_s=8 / 1e8)
FAR = Link(alpha_s=5e-2, beta_s=8 / 25e9)
COMPUTE_S = 0.3
TAIL = Round("all_reduce", 50, torch.float32)


def gain(ratio: float) -> float:
    """A gradient whose largest tenth holds 80 % of the energy."""
    return min(1.0, 0.8 * (ratio / 0.1) ** 0.3)


@dataclass
class World:
    """What a controller would see; `link` may change on the way.

    The link is told from the steps' own collectives, as the reducer does it. Ways take what is `beyond` their
    model. Every time is multiplied by a draw of `noise`. A leader's choice sends the share `led` of the gain.
    """

    link: Link
    gain: Callable[[float], float] = gain
    ranks: int = WORLD
    compute_s: float = COMPUTE_S
    beyond: dict[str, float] = field(default_factory=dict)
    in_codec: bool = False
    noise: Callable[[], float] = lambda: 1.0
    led: float = 1.0
    threshold: float = 0.2
    step: int = 0
    ran: Choice | None = None

    def shown(self, now: Choice) -> StepObservation:
        """One step in five looks; the first under a choice knows of none before it."""
        self.step += 1
        looked = (100.0, *(100.0 * self.gain(ratio) for ratio in RATIOS)) if self.step % 5 == 0 else None
        left = None if looked is None else 100.0 * (1.0 - self._share(now) * self.gain(now.ratio))
        if now is not self.ran:
            self.ran, self._traffic = now, LinkTraffic(self.ranks, threshold=self.threshold)
            self._steps = StepWatch(self.threshold)
            return StepObservation(self.step, 0.0, 0.0, looked, left=left)
        times = list(self._times(now))
        self._traffic.note(times)
        changes = self._traffic.hear([self._traffic.row])
        beyond_s = self.beyond.get(now.way, 0.0)
        sent_s = total_time(ROUNDS[self.ranks](now), self.ranks, Network(self.link))
        previous_s = (self.compute_s + sent_s + beyond_s) * self.noise()
        return StepObservation(
            self.step,
            previous_s,
            compressed_s=(0.01 + beyond_s * self.in_codec) * self.noise(),
            looked=looked,
            link=self._traffic.link,
            left=left,
            link_change=next(((each.before, each.after) for each in changes), None),
            step_change_s=self._steps.change_s(previous_s, link_has_changed=bool(changes)),
        )

    def _share(self, now: Choice) -> float:
        return 1.0 if now.way == ALL_GATHER else self.led

    def _times(self, now: Choice) -> Iterator[RoundTime]:
        """One round after the other, the tail last."""
        at_s = 0.0
        for sent in (*ROUNDS[self.ranks](now), TAIL):
            took_s = time_of(sent, self.ranks, Network(self.link)) * self.noise()
            named = getattr(sent, "algorithm", "library")
            verb = sent.verb if named == "library" else f"{sent.verb}/{named}"
            yield RoundTime(verb, sent.payload_bytes, at_s, at_s + took_s)
            at_s += took_s


def controller(
    rule: Rule = "progress",
    ranks: int = WORLD,
    ratio: float = 0.1,
    gain_change: float = 0.1,
    trigger: Trigger = "any",
) -> Flexible:
    watched = Watched(ranks, (NUMEL,))
    return Flexible(Choice(ratio, RING), watched, RATIOS, ROUNDS[ranks], rule, gain_change, trigger)


def choices(flexible: Flexible, world: World, steps: int) -> Iterator[tuple[int, Choice]]:
    """Every change of what runs; the same choice may come again for another reason."""
    for number in range(steps):
        before, choice = flexible.now, flexible.observe(world.shown(flexible.now))
        if choice is not None and choice != before:
            yield number, choice


def sending_s(link: Link, ratio: float, ranks: int = WORLD) -> dict[str, float]:
    """Seconds that each way takes by its model."""
    return {way: total_time(ROUNDS[ranks](Choice(ratio, way)), ranks, Network(link)) for way in WAYS}


def begun(
    world: World,
    rule: Rule = "progress",
    gain_change: float = 0.1,
    trigger: Trigger = "any",
    ratio: float = 0.1,
) -> Flexible:
    """A controller that has tried all ways, planned, and seen the link under what it has chosen."""
    flexible = controller(rule, world.ranks, ratio, gain_change, trigger)
    tried = [choice.way for _, choice in choices(flexible, world, 100)]
    assert tried[: len(WAYS) - 1] == [way for way in WAYS if way != RING]
    assert not flexible.tries
    return flexible


def test_a_fast_link_needs_no_change() -> None:
    world = World(FAST)
    flexible = begun(world)
    assert flexible.now == Choice(0.1, RING)
    assert list(choices(flexible, world, 100)) == []


@pytest.mark.parametrize("in_codec", [False, True])
def test_a_way_that_takes_more_than_its_model_is_left(in_codec: bool) -> None:
    world = World(FAST, beyond={RING: 0.2}, in_codec=in_codec)
    flexible = begun(world)
    assert flexible.now.way != RING
    assert min(sending_s(FAST, 0.1).values()) < 0.2
    world.beyond = {way: 0.2 for way in WAYS if way != RING}
    *_tried, (_, choice) = choices(flexible, world, 60)
    assert choice.way == flexible.now.way == RING, "noticed by what steps take over the same link"
    assert not flexible.tries


def test_a_slow_link_takes_a_smaller_ratio_within_ten_steps_and_then_rests() -> None:
    world = World(FAST)
    flexible = begun(world)
    world.link = SLOW
    [(step, choice)] = choices(flexible, world, 150)
    assert step < 10
    assert choice.ratio < 0.1
    assert flexible.now == choice


def test_good_bad_good_are_two_changes_each_within_ten_steps() -> None:
    world = World(FAST, noise=varying(3, 0.1))
    flexible = begun(world)
    good, found = flexible.now, []
    for link in (FAST, SLOW, FAST):
        world.link = link
        found.append(list(choices(flexible, world, 60)))
    assert [len(each) for each in found] == [0, 1, 1]
    assert all(step < 10 for [(step, _)] in found[1:])
    assert found[1][0][1].ratio < good.ratio == found[2][0][1].ratio


def test_a_doubled_batch_or_a_slow_rank_is_a_longer_step_and_ways_are_tried_again() -> None:
    world = World(FAST)
    flexible = begun(world)
    world.compute_s *= 2
    taken = list(choices(flexible, world, 100))
    assert [choice.way for _, choice in taken] == [ALL_GATHER, TREE, RING]
    assert taken[0][0] < 15


def test_latency_changes_the_collective() -> None:
    assert begun(World(FAR)).now.way in (ALL_GATHER, TREE), (
        "seven hops of 50 ms twice over are not worth the bytes"
    )


@pytest.mark.parametrize("link", [FAST, SLOW, FAR, Link(1e-2, 8 / 1e9)])
@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_the_way_is_the_one_whose_rounds_take_the_least(link: Link, ranks: int) -> None:
    for ratio in RATIOS:
        flexible = begun(World(link, ranks=ranks), ratio=ratio)
        took_s = sending_s(link, flexible.now.ratio, ranks)
        assert took_s[flexible.now.way] <= min(took_s.values()) / (1.0 - LEAD)


@pytest.mark.parametrize("world", [2, 4, 8, 32])
def test_latencies_are_those_of_what_runs(world: int) -> None:
    rounds, log = rounds_of(Watched(world, (64,)), one_unit), (world - 1).bit_length()
    hop = Network(Link(alpha_s=1.0, beta_s=0.0))
    hops = {way: total_time(rounds(Choice(0.5, way)), world, hop) for way in WAYS}
    assert hops == {ALL_GATHER: world - 1, RING: world + 2 * (world - 1), TREE: 3 * log}


@pytest.mark.parametrize(("link_change", "changes"), [(0.2, 1), (20.0, 0)])
def test_how_far_the_link_must_move_is_an_option(link_change: float, changes: int) -> None:
    world = World(SLOW, threshold=link_change)
    flexible = begun(world)
    world.link = Link(SLOW.alpha_s, SLOW.beta_s / 10)
    assert len(list(choices(flexible, world, 60))) == changes


@pytest.mark.parametrize(("gain_change", "changes"), [(0.1, 1), (0.9, 0)])
def test_how_far_the_gain_must_move_is_an_option(gain_change: float, changes: int) -> None:
    world = World(SLOW)
    flexible = begun(world, gain_change=gain_change)
    then = flexible.now.ratio
    world.gain = lambda ratio: min(1.0, gain(then) * 0.5 * ratio / then)
    assert len(list(choices(flexible, world, 60))) == changes


@pytest.mark.parametrize(("trigger", "changes"), [("any", 1), ("link", 0)])
def test_by_the_papers_trigger_only_the_link_plans_anew(trigger: Trigger, changes: int) -> None:
    world = World(SLOW)
    flexible = begun(world, trigger=trigger)
    then = flexible.now.ratio
    world.gain = lambda ratio: min(1.0, gain(then) * 0.5 * ratio / then)
    assert len(list(choices(flexible, world, 60))) == changes
    world.compute_s *= 2
    assert bool(list(choices(flexible, world, 60))) == (trigger == "any")
    world.link = Link(SLOW.alpha_s, SLOW.beta_s / 100)
    list(choices(flexible, world, 60))
    assert flexible.now.ratio == 0.1, "planned with the gain of now"


def varying(seed: int, share: float) -> Callable[[], float]:
    """Times vary by the share, and one in twenty is several times as long."""
    draw = Random(seed)
    return lambda: draw.lognormvariate(0.0, share) * (draw.uniform(2, 6) if draw.random() < 0.05 else 1.0)


@looped("link", [FAST, SLOW, FAR, Link(1e-3, 8 / 2e8)])
@looped("share", [0.1, 0.2])
@looped("seed", range(3))
def test_times_that_vary_over_a_constant_link_change_nothing_after_the_first_plan(
    link: Link, share: float, seed: int
) -> None:
    world = World(link, noise=varying(seed, share))
    changes = list(choices(controller(), world, 200))
    assert len(changes) <= len(WAYS) + 1, "two other ways, the fastest of all, and a plan"
    assert all(step < 40 for step, _ in changes)


NEARBY, QUICK, BOTH = Link(12e-3, SLOW.beta_s / 3), Link(38e-3, SLOW.beta_s / 3), Link(38e-3, SLOW.beta_s)
"""Between the first two only the latency differs, between the last two only the bandwidth."""


@pytest.mark.parametrize(
    ("before", "after", "ways"),
    [(NEARBY, QUICK, (RING, ALL_GATHER)), (QUICK, BOTH, (ALL_GATHER, RING))],
)
def test_a_link_that_changes_is_noticed_where_steps_take_as_long_as_they_did(
    before: Link, after: Link, ways: tuple[str, str]
) -> None:
    """Only the link itself can tell: a long backward pass leaves steps within a fifth of what they were."""
    world = World(before, ranks=4, compute_s=30.0)
    flexible = begun(world)
    assert flexible.now == Choice(0.1, ways[0])
    took_s = world.shown(flexible.now).previous_s
    world.link = after
    assert world.shown(flexible.now).previous_s == pytest.approx(took_s, rel=0.19)
    [(_, choice)] = choices(flexible, world, 100)
    assert choice == Choice(0.1, ways[1])


def test_a_bandwidth_that_is_not_resolved_is_said_and_makes_no_ratio_smaller() -> None:
    world = World(FAR)
    flexible = begun(world)
    assert flexible.now.ratio == 0.1
    assert flexible.why.startswith("50.00 ms and bandwidth not resolved, ")
    world.gain = lambda _ratio: 0.6  # as much of the gradient by a hundredth of the bytes
    assert list(choices(flexible, world, 100)) == []
    world.link = Link(FAR.alpha_s, SLOW.beta_s)
    [(_, choice)] = choices(flexible, world, 100)
    assert choice.ratio < 0.1, "now it is seen what the bytes take"


def test_where_the_bandwidth_is_not_resolved_ways_are_tried_and_not_compared_by_a_model() -> None:
    world = World(FAST, compute_s=30.0)
    flexible = begun(world)
    assert flexible.now.way == RING
    world.link, world.beyond = FAR, {ALL_GATHER: 1.0}
    taken = [choice.way for _, choice in choices(flexible, world, 100)]
    assert taken == [ALL_GATHER, TREE], "by the model an all-gather would be the fastest"


def test_where_a_small_ratio_shows_no_bandwidth_larger_ones_are_taken_until_one_does() -> None:
    link = Link(1e-2, 8 / 2e9)
    flexible, world = controller(ratio=RATIOS[-1]), World(link, compute_s=0.001)
    taken = [choice.ratio for _, choice in choices(flexible, world, 200)]
    assert sorted(set(taken)) == sorted(RATIOS)[:4]
    assert taken == sorted(taken)
    assert flexible.now == begun(World(link, compute_s=0.001)).now
    assert "2000 Mbit/s" in flexible.why


def test_what_gains_a_little_more_is_not_worth_a_switch() -> None:
    # As small as all that is sent here, everything takes the time of the rest of the step.
    flexible, world = controller(ratio=RATIOS[1]), World(FAST)
    world.gain = lambda ratio: 0.9 if ratio > RATIOS[1] else 0.88
    assert {choice.ratio for _, choice in choices(flexible, world, 60)} == {RATIOS[1]}, "only ways are tried"
    world.gain = lambda ratio: 0.9 if ratio > RATIOS[1] else 0.7
    [(_, choice)] = choices(flexible, world, 60)
    assert choice.ratio > RATIOS[1]


def test_a_gradient_that_gets_flat_is_planned_for_anew() -> None:
    world = World(SLOW)
    flexible = begun(world)
    before = flexible.now.ratio
    world.gain = lambda ratio: min(1.0, ratio * 3)
    [(_, after)] = choices(flexible, world, 60)
    assert after.ratio > before


def test_the_gain_is_what_is_really_sent_and_decides_between_ways() -> None:
    """Between four ranks an all-gather takes more bytes than a ring here, and less than a third more."""
    alike, apart = World(SLOW, ranks=4, compute_s=3.0), World(SLOW, ranks=4, compute_s=3.0, led=0.7)
    assert begun(alike).now.way == RING
    assert begun(apart).now.way == ALL_GATHER


def test_the_knee_is_that_of_the_sweep() -> None:
    flexible = begun(World(SLOW), "knee")
    assert "and 100 Mbit/s call for" in flexible.why

    def evaluate(ratio: float) -> RatioCandidate:
        return RatioCandidate(ratio, 0.01, min(sending_s(SLOW, ratio).values()), gain(ratio))

    assert flexible.now.ratio == best_ratio(evaluate, RATIOS).ratio


def test_alone_there_is_nothing_to_choose() -> None:
    watched = Watched(1, (NUMEL,))
    flexible = Flexible(Choice(0.1, RING), watched, RATIOS, rounds_of(watched, one_unit))
    shown = StepObservation(
        1, previous_s=0.3, compressed_s=0.01, looked=(1.0, *(0.5 for _ in RATIOS)), link=SLOW
    )
    assert [flexible.observe(shown) for _ in range(60)] == 60 * [None]
