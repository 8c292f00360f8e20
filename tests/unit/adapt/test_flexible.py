"""The controller of ratio and collective, in worlds of known links and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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

    def shown(self) -> Observed:
        """One step in five looks, the next has the probes' durations."""
        self.step += 1
        network = Network(self.link)
        probes = [
            time_of(Transfer("all_reduce", 4.0 * numel), WORLD, network) * self.disturbed for numel in PROBES
        ]
        looked = (100.0, *(100.0 * self.gain(ratio) for ratio in RATIOS))
        return Observed(
            self.step,
            previous_s=COMPUTE_S,
            compressed_s=0.01,
            looked=looked if self.step % 5 == 0 else None,
            probed_s=tuple(probes) if self.step % 5 == 1 else None,
        )


def controller(rule: Rule = "progress", ratio: float = 0.1, way: str = RING, **thresholds: float) -> Flexible:
    rounds = rounds_of(WATCHED, one_unit)
    return Flexible(Choice(ratio, way), WATCHED, RATIOS, rounds, rule, **thresholds)


def choices(flexible: Flexible, world: World, steps: int) -> Iterator[tuple[int, Choice]]:
    for number in range(steps):
        choice = flexible.observe(world.shown())
        if choice is not None:
            yield number, choice


def test_a_fast_link_needs_no_change() -> None:
    assert list(choices(controller(), World(FAST), 100)) == []


def test_a_slow_link_takes_a_smaller_ratio_within_twenty_steps_and_then_rests() -> None:
    flexible, world = controller(), World(FAST)
    assert list(choices(flexible, world, 30)) == []
    world.link = SLOW
    [(step, choice)] = choices(flexible, world, 100)
    assert step <= 20
    assert choice.ratio < 0.1
    assert flexible.now == choice


def test_it_comes_back_when_the_link_does() -> None:
    flexible, world = controller(), World(SLOW)
    first = [choice for _, choice in choices(flexible, world, 60)]
    world.link = FAST
    second = [choice for _, choice in choices(flexible, world, 60)]
    assert len(first) == len(second) == 1
    assert second[0].ratio > first[0].ratio


def test_latency_changes_the_collective() -> None:
    flexible, world = controller(), World(FAR)
    [(_, choice)] = choices(flexible, world, 60)
    assert choice.way in (ALL_GATHER, TREE), "seven hops of 50 ms twice over are not worth the bytes"


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


@pytest.mark.parametrize(("link_change", "changes"), [(0.2, 1), (3.0, 0)])
def test_how_far_the_link_must_move_is_an_option(link_change: float, changes: int) -> None:
    flexible, world = controller(link_change=link_change), World(SLOW)
    _ = list(choices(flexible, world, 60))
    world.link = Link(SLOW.alpha_s, SLOW.beta_s / 3)
    assert len(list(choices(flexible, world, 60))) == changes


@pytest.mark.parametrize(("gain_change", "changes"), [(0.1, 1), (0.9, 0)])
def test_how_far_the_gain_must_move_is_an_option(gain_change: float, changes: int) -> None:
    flexible, world = controller(gain_change=gain_change), World(SLOW)
    _ = list(choices(flexible, world, 60))
    then = flexible.now.ratio
    world.gain = lambda ratio: min(1.0, gain(then) * 0.5 * ratio / then)
    assert len(list(choices(flexible, world, 60))) == changes


def test_a_single_disturbed_probe_changes_nothing() -> None:
    flexible, world = controller(), World(FAST)
    assert list(choices(flexible, world, 30)) == []
    world.disturbed = 500.0
    assert list(choices(flexible, world, 5)) == []
    world.disturbed = 1.0
    assert list(choices(flexible, world, 60)) == []


def test_what_gains_a_little_more_is_not_worth_a_switch() -> None:
    # As small as all that is sent here, everything takes the time of the rest of the step.
    flexible, world = controller(ratio=RATIOS[1]), World(FAST)
    world.gain = lambda ratio: 0.9 if ratio > RATIOS[1] else 0.88
    assert list(choices(flexible, world, 60)) == []
    world.gain = lambda ratio: 0.9 if ratio > RATIOS[1] else 0.7
    [(_, choice)] = choices(flexible, world, 60)
    assert choice.ratio > RATIOS[1]


def test_a_gradient_that_gets_flat_is_planned_for_anew() -> None:
    flexible, world = controller(), World(SLOW)
    [(_, before)] = choices(flexible, world, 60)
    world.gain = lambda ratio: min(1.0, ratio * 3)
    [(_, after)] = choices(flexible, world, 60)
    assert after.ratio > before.ratio


def test_the_knee_is_that_of_the_sweep() -> None:
    flexible, world = controller("knee"), World(SLOW)
    _ = list(choices(flexible, world, 60))
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
