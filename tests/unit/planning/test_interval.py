"""Units for an interval: what the steps of a cycle carry, and when they end."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from random import Random
from statistics import median

from gradwire.planning.boundaries import phased_boundaries
from gradwire.planning.collectives import Transfer
from gradwire.planning.costs import BackwardTiming, Line, Link, Network
from gradwire.planning.interval import bucketed, paper_boundaries, shards
from gradwire.planning.step_time import step_time
from tests.support.looped import looped
from tests.support.planning_problems import (
    backward,
    balanced_boundaries,
    imbalance,
    step_traffic,
    units_between,
)

WIRE = Line(0.02, 3e-6)
MODELS = {
    "even": BackwardTiming(0.0, tuple(i / 20 for i in range(1, 21)), (50_000,) * 20, 1.0),
    "one large": BackwardTiming(
        0.0, (0.1, 0.2, 0.3, 0.9, 1.0), (20_000, 20_000, 900_000, 30_000, 30_000), 1.0
    ),
    "large last": BackwardTiming(0.0, (0.4, 0.8, 1.0), (100_000, 100_000, 800_000), 1.0),
    "random": backward(Random(5), 30),
}
every_model = looped("of", MODELS.values())
every_interval = looped("interval", [1, 2, 3, 4, 7])


def sizes(boundaries: tuple[int, ...], numel: int) -> list[int]:
    return [stop - start for start, stop in pairwise((0, *boundaries, numel))]


def cycle(of: BackwardTiming, boundaries: tuple[int, ...], interval: int) -> list[float]:
    """Seconds of the steps of one interval."""
    network = Network(Link(WIRE.base_s, WIRE.slope_s / 4))

    def rounds(step: int, index: int, numel: int) -> tuple[Transfer, ...]:
        return (Transfer("shift", 4.0 * numel),) if (index + step) % interval == 0 else ()

    return [
        step_time(units_between(of, boundaries, partial(rounds, step), 2, network), of.total_s)
        for step in range(interval)
    ]


@every_model
@every_interval
def test_balanced_steps_carry_the_same(of: BackwardTiming, interval: int) -> None:
    boundaries = balanced_boundaries(of, interval, WIRE)
    units = sizes(boundaries, sum(of.numel))
    traffic = step_traffic(units, interval)
    assert min(units) > 0
    assert sum(traffic) == sum(of.numel)
    # Each segment's units differ by one element at most.
    assert max(traffic) - min(traffic) <= len(units) // interval


@every_model
@every_interval
def test_balanced_boundaries_end_no_later_than_others(of: BackwardTiming, interval: int) -> None:
    found = max(cycle(of, balanced_boundaries(of, interval, WIRE), interval))
    fixed = max(cycle(of, phased_boundaries(of.numel, interval), interval))
    sharded = max(cycle(of, paper_boundaries(of.numel, interval, unit=100_000), interval))
    # Segments end at 256ths of the elements: other boundaries can be better by what one of those takes on the
    # wire.
    grain = WIRE.slope_s * sum(of.numel) / 256
    assert found <= min(fixed, sharded) + grain


@every_model
@looped("share", [0.05, 0.2, 0.5, 0.95])
@looped("interval", [1, 2, 3, 7])
def test_segments_are_few_where_everything_hides(of: BackwardTiming, share: float, interval: int) -> None:
    # A step's bytes take this share of the backward pass, so only the last unit can be seen.
    wire = Line(2e-4, share * interval * of.total_s / sum(of.numel))
    segments = (1 + len(balanced_boundaries(of, interval, wire))) / interval
    assert segments <= 20


@every_model
def test_without_an_interval_it_is_the_best_grouping_of_pieces(of: BackwardTiming) -> None:
    boundaries = balanced_boundaries(of, 1, WIRE)
    (found,) = cycle(of, boundaries, 1)
    (whole,) = cycle(of, (), 1)
    (layers,) = cycle(of, tuple(accumulate(of.numel))[:-1], 1)
    assert found <= min(whole, layers) + WIRE.slope_s * sum(of.numel) / 256


def test_buckets_hold_whole_tensors_and_close_when_full() -> None:
    assert bucketed([1, 1, 1, 1, 1, 1], unit=3, first=1) == (1, 3, 2)
    assert bucketed([10, 1, 1], unit=3, first=1) == (10, 2)
    assert bucketed([], unit=3) == (0,)


@every_interval
def test_shards_are_at_most_the_interval(interval: int) -> None:
    draw = Random(interval)
    units = [draw.randint(1, 10**6) for _ in range(9)]
    parts = shards(units, interval)
    middle = median(units)
    for numel, number in zip(units, parts, strict=True):
        assert 1 <= number <= interval
        assert number == min(interval, max(1, int(numel // middle)))


def test_paper_boundaries_divide_evenly() -> None:
    # Units of 10, 40 and 10 under a median of 10: the middle one into three.
    boundaries = paper_boundaries([10, 40, 10], 3, unit=10)
    assert boundaries == (10, 23, 36, 50)


def test_traffic_by_hand() -> None:
    assert step_traffic((1, 2, 3, 4, 5), 2) == (1 + 3 + 5, 2 + 4)
    assert imbalance((1, 2, 3, 4, 5), 2) == 9 / 7.5
