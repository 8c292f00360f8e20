"""The controller of ratio and collective, in worlds of known links and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from gradwire.adapt.flexible import PROBES, WAYS, Choice, Flexible, Rule
from gradwire.plan import Observed, Watched
from gradwire.plan.ar_topk import ALL_GATHER, RING, TREE
from gradwire.plan.collectives import Transfer, time_of, total_time
from gradwire.plan.costs import Link, Network
from gradwire.plan.ratio import Candidate, best_ratio, candidate_ratios
from gradwire.recipes.ar_topk import one_unit
from gradwire.recipes.flexible import rounds_of

NUMEL, WORLD = 10_000_000, 8
RATIOS = candidate_ratios()
WATCHED = Watched(WORLD, (NUMEL,))
ROUNDS = rounds_of(WATCHED, one_unit)
FAST = Link(alpha_s=1e-4, beta_s=8 / 25e9)
SLOW = Link(alpha_s=1e-4, beta_s=8 / 1e8)
FAR = Link(alpha_s=5e-2, beta_s=8 / 25e9)
COMPUTE_S = 0.3


def gain(ratio: float) -> float:
    """A gradient whose largest tenth holds 80 % of the energy."""
    return min(1.0, 0.8 * (ratio / 0.1) ** 0.3)


@dataclass
class World:
    """What a controller would see; `link` may change on the way."""

    link: Link
    gain: Callable[[float], float] = gain
    step: int = 0
    disturbed: float = 1.0
    beyond: dict[str, float] = field(default_factory=dict)
    in_codec: bool = False

    def shown(self, now: Choice) -> Observed:
        """One step in five looks, the next has probes' durations; ways take what is `beyond` their model."""
        self.step += 1
        network = Network(self.link)
        probes = [
            time_of(Transfer("all_reduce", 4.0 * numel), WORLD, network) * self.disturbed for numel in PROBES
        ]
        looked = (100.0, *(100.0 * self.gain(ratio) for ratio in RATIOS))
        return Observed(
            self.step,
            previous_s=COMPUTE_S + total_time(ROUNDS(now), WORLD, network) + self.beyond.get(now.way, 0.0),
            compressed_s=0.01 + (self.beyond.get(now.way, 0.0) if self.in_codec else 0.0),
            looked=looked if self.step % 5 == 0 else None,
            probed_s=tuple(probes) if self.step % 5 == 1 else None,
        )


def controller(rule: Rule = "progress", ratio: float = 0.1, way: str = RING, **thresholds: float) -> Flexible:
    return Flexible(Choice(ratio, way), WATCHED, RATIOS, ROUNDS, rule, **thresholds)


def choices(flexible: Flexible, world: World, steps: int) -> Iterator[tuple[int, Choice]]:
    for number in range(steps):
        choice = flexible.observe(world.shown(flexible.now))
        if choice is not None:
            yield number, choice


def begun(world: World, rule: Rule = "progress", **thresholds: float) -> Flexible:
    """A controller that has tried all ways, and planned."""
    flexible = controller(rule, **thresholds)
    tried = [choice.way for _, choice in choices(flexible, world, 40)]
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
    _, sent_s = flexible._fastest(0.1, Network(FAST))
    assert flexible.now.way != RING
    assert sent_s < 0.2
    world.beyond = {way: 0.2 for way in WAYS if way != RING}
    *_tried, (_, choice) = choices(flexible, world, 60)
    assert choice.way == flexible.now.way == RING, "noticed by what steps take"
    assert not flexible.tries


def test_a_slow_link_takes_a_smaller_ratio_within_twenty_steps_and_then_rests() -> None:
    world = World(FAST)
    flexible = begun(world)
    world.link = SLOW
    *tried, (step, choice) = choices(flexible, world, 100)
    assert {each.way for _, each in tried} == {ALL_GATHER, TREE}, "another link, so they are tried again"
    assert step <= 20
    assert choice.ratio < 0.1
    assert flexible.now == choice


def test_it_comes_back_when_the_link_does() -> None:
    world = World(SLOW)
    flexible = begun(world)
    before = flexible.now.ratio
    assert before < 0.1
    world.link = FAST
    *_tried, (_, choice) = choices(flexible, world, 60)
    assert choice.ratio > before


def test_latency_changes_the_collective() -> None:
    assert begun(World(FAR)).now.way in (ALL_GATHER, TREE), (
        "seven hops of 50 ms twice over are not worth the bytes"
    )


@pytest.mark.parametrize("link", [FAST, SLOW, FAR, Link(1e-2, 8 / 1e9)])
@pytest.mark.parametrize("world", [2, 4, 8, 32])
def test_the_way_is_the_one_whose_rounds_take_the_least(link: Link, world: int) -> None:
    watched = Watched(world, (NUMEL,))
    rounds = rounds_of(watched, one_unit)
    for ratio in RATIOS:
        took_s = {way: total_time(rounds(Choice(ratio, way)), world, Network(link)) for way in WAYS}
        best = min(took_s, key=lambda way: took_s[way])
        flexible = Flexible(Choice(ratio, best), watched, RATIOS, rounds)
        assert flexible._fastest(ratio, Network(link)) == (best, took_s[best])


@pytest.mark.parametrize("world", [2, 4, 8, 32])
def test_latencies_are_those_of_what_runs(world: int) -> None:
    rounds, log = rounds_of(Watched(world, (64,)), one_unit), (world - 1).bit_length()
    hop = Network(Link(alpha_s=1.0, beta_s=0.0))
    hops = {way: total_time(rounds(Choice(0.5, way)), world, hop) for way in WAYS}
    assert hops == {ALL_GATHER: world - 1, RING: world + 2 * (world - 1), TREE: 3 * log}


@pytest.mark.parametrize(("link_change", "changes"), [(0.2, len(WAYS)), (3.0, 0)])
def test_how_far_the_link_must_move_is_an_option(link_change: float, changes: int) -> None:
    world = World(SLOW)
    flexible = begun(world, link_change=link_change)
    world.link = Link(SLOW.alpha_s, SLOW.beta_s / 3)
    assert len(list(choices(flexible, world, 60))) == changes


@pytest.mark.parametrize(("gain_change", "changes"), [(0.1, 1), (0.9, 0)])
def test_how_far_the_gain_must_move_is_an_option(gain_change: float, changes: int) -> None:
    world = World(SLOW)
    flexible = begun(world, gain_change=gain_change)
    then = flexible.now.ratio
    world.gain = lambda ratio: min(1.0, gain(then) * 0.5 * ratio / then)
    assert len(list(choices(flexible, world, 60))) == changes


def test_a_single_disturbed_probe_changes_nothing() -> None:
    world = World(FAST)
    flexible = begun(world)
    world.disturbed = 500.0
    assert list(choices(flexible, world, 5)) == []
    world.disturbed = 1.0
    assert list(choices(flexible, world, 60)) == []


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


def test_the_knee_is_that_of_the_sweep() -> None:
    flexible = begun(World(SLOW), "knee")
    link = flexible.link
    assert link.alpha_s == pytest.approx(SLOW.alpha_s, rel=1e-2)  # a float32 is no part of the latency probe
    assert link.beta_s == pytest.approx(SLOW.beta_s, rel=1e-2)

    def evaluate(ratio: float) -> Candidate:
        _, seconds = flexible._fastest(ratio, Network(link))
        return Candidate(ratio, 0.01, seconds, gain(ratio))

    assert flexible.now.ratio == best_ratio(evaluate, RATIOS).ratio


def test_alone_there_is_nothing_to_choose() -> None:
    watched = Watched(1, (NUMEL,))
    flexible = Flexible(Choice(0.1, RING), watched, RATIOS, rounds_of(watched, one_unit))
    assert list(choices(flexible, World(SLOW), 60)) == []
