"""Changes of the link, noticed in our own traffic."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from gradwire.measure.link import Change, LinkMonitor, Sample
from gradwire.planning.change_detection import SOONEST, WINDOW
from gradwire.planning.collectives import hops, serial_bytes
from gradwire.planning.costs import Link
from tests.support.looped import looped

WORLD = 4
SIZES = (2_000, 100_000, 1_000_000)
BASE = Link(1e-3, 4e-8)
CHANGES = {
    "bandwidth halved": Link(1e-3, 8e-8),
    "bandwidth doubled": Link(1e-3, 2e-8),
    "bandwidth less by 30 %": Link(1e-3, 4e-8 / 0.7),
    "latency times five": Link(5e-3, 4e-8),
    "latency a fifth": Link(2e-4, 4e-8),
    "both": Link(5e-3, 1.6e-7),
}


def _steps(
    link: Link, number: int, draw: random.Random, noise: float, sizes: Sequence[int] = SIZES
) -> Iterator[list[Sample]]:
    """Steps with a collective of each size; one in twenty takes several times as long."""
    for _ in range(number):
        samples = []
        for payload in sizes:
            x = serial_bytes("all_reduce", payload, WORLD)
            seconds = hops("all_reduce", WORLD) * link.alpha_s + x * link.beta_s
            seconds *= max(0.5, draw.gauss(1.0, noise)) * (draw.uniform(2, 6) if draw.random() < 0.05 else 1)
            samples.append(Sample("all_reduce", payload, seconds))
        yield samples


def _changes(monitor: LinkMonitor, steps: Iterator[list[Sample]]) -> list[tuple[int, Change]]:
    found = [(number, monitor.observe(samples)) for number, samples in enumerate(steps, start=1)]
    return [(number, change) for number, changes in found for change in changes]


@looped("name", CHANGES)
@looped("seed", range(5))
def test_a_change_is_noticed_within_10_steps(name: str, seed: int) -> None:
    draw, monitor = random.Random(seed), LinkMonitor(WORLD)
    assert _changes(monitor, _steps(BASE, 60, draw, noise=0.05)) == []
    (number, change), *more = _changes(monitor, _steps(CHANGES[name], 60, draw, noise=0.05))
    assert number <= 10
    assert more == []
    # Medians of five values with 5 % of noise or more are off by 7 % at most in these draws; the smallest
    # time is half latency, the largest four fifths bandwidth, so a line through them is off by thrice that.
    assert change.after.beta_s == pytest.approx(CHANGES[name].beta_s, rel=0.2)
    assert change.before.alpha_s == pytest.approx(BASE.alpha_s, rel=0.2)
    assert monitor.links["all_reduce"].alpha_s == pytest.approx(CHANGES[name].alpha_s, rel=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_what_stays_is_not_reported(seed: int) -> None:
    steps = _steps(BASE, 300, random.Random(100 + seed), noise=0.05)
    assert _changes(LinkMonitor(WORLD), steps) == []


@looped("share", [0.1, 10.0])
def test_the_link_is_what_most_of_a_step_s_collectives_of_a_size_find(share: float) -> None:
    monitor = LinkMonitor(WORLD)
    seconds = [share * 0.1, share * 0.1, 0.1, 0.1, 0.1]
    for _ in range(20):
        monitor.observe([Sample("all_reduce", 1e6, each) for each in seconds])
    expected = 0.1 / serial_bytes("all_reduce", 1e6, WORLD)
    assert monitor.links["all_reduce"].beta_s == pytest.approx(expected)


@pytest.mark.parametrize("seed", [0, 15, 35, 59])  # of the last three none passes by chance
def test_a_part_of_a_time_that_varies_by_a_fifth_is_known_less_well_than_the_whole(seed: int) -> None:
    # Two thirds of the larger are bytes: what both vary by makes half as much again of the bandwidth.
    steps = _steps(BASE, 300, random.Random(seed), noise=0.2, sizes=(200, 200_000))
    assert _changes(LinkMonitor(WORLD), steps) == []


def test_changes_below_the_threshold_are_not_reported_and_a_higher_threshold_hides_more() -> None:
    smaller, larger = Link(1e-3, 4e-8 * 1.15), Link(1e-3, 4e-8 * 1.5)
    for threshold, link, expected in (
        (0.2, smaller, 0),
        (0.1, smaller, 1),
        (0.2, larger, 1),
        (0.6, larger, 0),
    ):
        draw, monitor = random.Random(1), LinkMonitor(WORLD, threshold)
        steps = [*_steps(BASE, 40, draw, 0.0), *_steps(link, 40, draw, 0.0)]
        assert len(_changes(monitor, iter(steps))) == expected


def test_back_and_forth_are_two_changes() -> None:
    draw, monitor = random.Random(2), LinkMonitor(WORLD)
    slow = CHANGES["both"]
    steps = [*_steps(BASE, 50, draw, 0.02), *_steps(slow, 50, draw, 0.02), *_steps(BASE, 50, draw, 0.02)]
    changes = [change for _, change in _changes(monitor, iter(steps))]
    assert len(changes) == 2
    assert changes[0].before.beta_s < changes[0].after.beta_s
    assert changes[1].before.beta_s > changes[1].after.beta_s


def test_with_one_size_all_time_is_bandwidth() -> None:
    monitor = LinkMonitor(2)
    for _ in range(WINDOW):
        monitor.observe([Sample("shift", 1000, 1e-3)])
    assert monitor.links == {"shift": Link(0.0, 1e-6)}


def test_no_link_is_told_from_small_messages_before_the_larger_ones_are_known() -> None:
    monitor, link = LinkMonitor(2), Link(1e-3, 1e-8)
    for step in range(2 * WINDOW - 1):
        payloads = (40, 1_000_000 if step % 2 else 3_000_000)
        samples = [Sample("all_reduce", size, 2 * link.alpha_s + size * link.beta_s) for size in payloads]
        assert monitor.observe(samples) == ()
        assert not monitor.links or step == 2 * WINDOW - 2, "40 bytes by themselves are 160 kbit/s"
    assert monitor.links["all_reduce"].alpha_s == pytest.approx(link.alpha_s)
    assert monitor.links["all_reduce"].beta_s == pytest.approx(link.beta_s)


def test_several_collectives_of_a_size_count_once_and_those_without_bytes_or_time_not_at_all() -> None:
    monitor = LinkMonitor(2)
    for _ in range(WINDOW):
        many = [Sample("shift", 1000, seconds) for seconds in (1e-3, 1e-3, 9.0)]
        assert monitor.observe([*many, Sample("shift", 0, 1.0), Sample("all_gather", 8, 0.0)]) == ()
    assert monitor.links == {"shift": Link(0.0, 1e-6)}


def test_verbs_are_watched_apart() -> None:
    monitor = LinkMonitor(2)
    for step in range(4 * WINDOW):
        slow = 1e-3 if step < 2 * WINDOW else 3e-3
        changes = monitor.observe([Sample("shift", 1000, 1e-3), Sample("all_gather", 1000, slow)])
        assert [change.verb for change in changes] == ["all_gather"] * (step == 2 * WINDOW + SOONEST - 1)


def test_a_threshold_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"threshold=0\.0 must be above 0"):
        LinkMonitor(2, 0.0)
