"""From a step's rounds to samples for the monitor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradwire.measure.clock import RoundTime
from gradwire.measure.link import LinkTraffic, under_way, votes_alone
from gradwire.planning.change_detection import SOONEST, WINDOW
from gradwire.planning.collectives import hops, serial_bytes
from gradwire.planning.costs import Link

WORLD, UNIT_BYTES, TAIL_BYTES = 3, 600_000, 120


def _step(link: Link, late_s: float = 0.0) -> list[RoundTime]:
    """Two gathers under way at once, then the tail, as a rank sees them that enters `late_s` too early."""
    wire_s = hops("all_gather", WORLD) * link.alpha_s
    wire_s += 2 * serial_bytes("all_gather", UNIT_BYTES, WORLD) * link.beta_s
    tail_s = hops("all_reduce", WORLD) * link.alpha_s
    tail_s += serial_bytes("all_reduce", TAIL_BYTES, WORLD) * link.beta_s
    start_s = 5.0 + wire_s
    return [
        RoundTime("all_gather", UNIT_BYTES, 5.0 - late_s, 5.0 + 0.6 * wire_s),
        RoundTime("all_gather", UNIT_BYTES, 5.0 + 0.1 * wire_s, 5.0 + wire_s),
        RoundTime("all_reduce", TAIL_BYTES, start_s, start_s + tail_s + late_s),
    ]


def test_a_change_is_seen_by_all_ranks_in_the_same_step() -> None:
    before, after = Link(1e-3, 1e-8), Link(1e-3, 4e-8)
    ranks = [LinkTraffic(WORLD), LinkTraffic(WORLD)]
    seen: list[list[int]] = [[], []]
    for step in range(4 * WINDOW):
        rows = [rank.row for rank in ranks]
        for rank, found in zip(ranks, seen, strict=True):
            found += [step] * len(rank.hear(rows))
            rank.note(_step(before if step < 2 * WINDOW else after, late_s=0.5 * (rank is ranks[1])))
    # A step's times ride on the next one's status vote.
    assert seen == 2 * [[2 * WINDOW + SOONEST]]
    link = ranks[0].monitor.links["all_reduce"]
    assert link == ranks[1].monitor.links["all_reduce"]
    # The tail's 160 bytes take 6.4 µs of its 4 ms.
    assert link.alpha_s == pytest.approx(after.alpha_s, rel=0.002)
    assert link.beta_s == pytest.approx(after.beta_s, rel=0.002)


@pytest.mark.parametrize("verbs", [["all_gather"], ["broadcast/scatter", "all_reduce"], ["all_reduce/tree"]])
@pytest.mark.parametrize("link", [Link(5e-2, 4e-10), Link(1e-4, 1e-8)])
@pytest.mark.parametrize("tail", ["all_reduce", "all_reduce/direct"])
def test_latencies_are_told_from_bytes_whatever_they_are_carried_by(
    verbs: list[str], link: Link, tail: str
) -> None:
    """Far away an all-gather of much takes less time than the tail, and two rounds in a row more."""
    traffic, world = LinkTraffic(8), 8
    rounds, now_s = [], 1.0
    for verb, size in zip([*verbs, tail], [*[800_000] * len(verbs), TAIL_BYTES], strict=True):
        took_s = hops(verb, world) * link.alpha_s + serial_bytes(verb, size, world) * link.beta_s
        rounds.append(RoundTime(verb, size, now_s, now_s := now_s + took_s))
    for _ in range(WINDOW):
        traffic.note(rounds)
        traffic.hear([traffic.row] * world)
    assert traffic.link is not None
    assert traffic.link.alpha_s == pytest.approx(link.alpha_s, rel=0.01)
    assert traffic.link.beta_s == pytest.approx(link.beta_s, rel=0.01)


def test_tails_that_are_alone_now_and_then_tell_the_latency() -> None:
    link, change = Link(5e-3, 1e-8), Link(5e-3, 4e-8)
    traffic, seen = LinkTraffic(WORLD), []
    for step in range(400):
        *gathers, tail = _step(link if step < 200 else change)
        seen += [step] * len(traffic.hear([traffic.row] * WORLD))
        # A tail that goes with the payloads ends with them.
        beside = replace(tail, start_s=gathers[1].start_s, stop_s=gathers[1].stop_s)
        traffic.note([*gathers, tail if votes_alone(step) else beside])
        if step == 199:
            assert traffic.link is not None
            assert traffic.link.alpha_s == pytest.approx(link.alpha_s, rel=0.01)
            assert traffic.link.beta_s == pytest.approx(link.beta_s, rel=0.01)
    assert seen == [200 + SOONEST]
    assert traffic.link is not None
    assert traffic.link.alpha_s == pytest.approx(change.alpha_s, rel=0.01)
    assert traffic.link.beta_s == pytest.approx(change.beta_s, rel=0.01)


def test_a_tail_that_was_not_alone_says_nothing() -> None:
    traffic = LinkTraffic(WORLD)
    traffic.note([RoundTime("all_reduce", 9, 0.0, 2.0), RoundTime("all_reduce", 9, 1.0, 3.0)])
    assert traffic.row == (0.0, 2.0, 9.0, 4.0)


@pytest.mark.parametrize("others", [[], [RoundTime("all_reduce", 600_000, 0.0, None)]])
def test_a_tail_by_itself_says_nothing_of_a_link(others: list[RoundTime]) -> None:
    """All of its time is latency; its few bytes would make that 10 kbit/s."""
    traffic = LinkTraffic(WORLD)
    for _ in range(2 * WINDOW):
        traffic.note([*others, RoundTime("all_reduce", TAIL_BYTES, 1.0, 1.1)])
        assert traffic.hear([traffic.row] * WORLD) == ()
    assert traffic.link is None


def test_bytes_are_those_of_the_algorithm_that_runs() -> None:
    traffic, tail = LinkTraffic(5), RoundTime("all_reduce", 9, 4.0, 5.0)
    payloads = []
    for verb in ("broadcast", "broadcast/scatter", "all_reduce", "all_reduce/tree"):
        traffic.note([RoundTime(verb, 1000, 0.0, 1.0), tail])
        payloads.append(traffic.row[2])
    # As an all-reduce in a ring, which passes 8/5 of its payload on; a tree has three levels.
    assert payloads == pytest.approx([3000 / 1.6, 1000, 1000, 6000 / 1.6])


def test_a_step_that_broke_off_is_forgotten() -> None:
    traffic = LinkTraffic(WORLD)
    traffic.note(_step(Link(1e-3, 1e-8)))
    assert min(traffic.row) > 0.0
    traffic.forget()
    assert traffic.row == (0.0, 0.0, 0.0, 0.0)


def test_ranks_that_sent_different_amounts_come_to_one_answer() -> None:
    ranks = [LinkTraffic(WORLD) for _ in range(WORLD)]
    for _ in range(2 * WINDOW):
        for number, rank in enumerate(ranks):
            frame = RoundTime("shift", 1000 + 500 * number, 0.0, 0.5)
            rank.note([frame, RoundTime("all_reduce", 40, 1.0, 1.1)])
        rows = [rank.row for rank in ranks]
        assert len({str(rank.hear(rows)) for rank in ranks}) == 1
    links = [rank.monitor.links for rank in ranks]
    assert links[0]
    assert all(each == links[0] for each in links)


def test_alone_there_is_nothing_to_watch() -> None:
    traffic = LinkTraffic(1)
    for _ in range(2 * WINDOW):
        traffic.note(_step(Link(1e-3, 1e-8)))
        assert traffic.hear([traffic.row]) == ()
    assert traffic.monitor.links == {}


def test_gaps_are_not_busy_and_overlaps_count_once() -> None:
    spans = [("shift", 0.0, 4.0), ("all_gather", 1.0, 2.0), ("shift", 6.0, 7.0), ("shift", 6.5, None)]
    rounds = [RoundTime(verb, 1, start_s, stop_s) for verb, start_s, stop_s in spans]
    assert under_way(rounds, world=3) == (5.0, 2 + 1)
    assert under_way([], world=3) == (0.0, 0.0)
