"""As many connections as a link needs, whose time is known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from gradwire.comm import Comm, Pending, Round, ThreadComm, run_ranks
from gradwire.comm.base import DONE
from gradwire.measure.connections import Tried, tried

WINDOW_BYTES = 2.0**19


class _Far(Comm):
    """Messages over `connections`, each of which carries a window in a round trip, on a link of `rate`."""

    def __init__(
        self, inner: ThreadComm, trip_s: float, byte_per_s: float, delays_s: Sequence[float]
    ) -> None:
        self.rank, self.world = inner.rank, inner.world
        self._inner, self._trip_s, self._byte_per_s = inner, trip_s, byte_per_s
        self._delays_s = iter(delays_s)
        self.now_s, self.messages = 0.0, 0

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        self._inner.issue(round_, tensor, out).wait()
        byte_per_s = min(self._byte_per_s, self.connections * WINDOW_BYTES / self._trip_s)
        self.now_s += self._trip_s + tensor.nbytes / byte_per_s + next(self._delays_s, 0.0)
        self.messages += 1
        return DONE


def found(
    trips_s: Sequence[float], byte_per_s: float, most: int = 64, delays_s: Sequence[float] = ()
) -> tuple[list[Tried], list[int], list[int]]:
    """What ranks find, the numbers of connections that they try, and how many messages each sends."""
    counts: list[int] = []

    def body(inner: ThreadComm) -> tuple[Tried, int]:
        far = _Far(inner, trips_s[inner.rank], byte_per_s, delays_s)

        def over(count: int) -> Comm | None:
            if inner.rank == 0:
                counts.append(count)
            if count > most:
                return None
            far.connections = count
            return far

        return tried(over, inner, clock=lambda: far.now_s), far.messages

    results, messages = zip(*run_ranks(len(trips_s), body), strict=True)
    return list(results), counts, list(messages)


@pytest.mark.parametrize(
    ("byte_per_s", "connections"),
    [
        (2e6, 1),  # a window is more than the link carries in a round trip
        (WINDOW_BYTES / 0.05, 1),
        (2 * WINDOW_BYTES / 0.05, 2),
        (4 * WINDOW_BYTES / 0.05, 4),
        (1e9, 8),
    ],
)
def test_connections_are_as_many_as_fill_the_link(byte_per_s: float, connections: int) -> None:
    results, counts, _messages = found([0.05, 0.05], byte_per_s)
    assert {each.connections for each in results} == {connections}
    assert counts == [1, 2, 4, 8][: len(counts)]
    assert set(results[0].times_s) == set(counts)


def test_where_a_round_trip_is_short_nothing_more_is_sent() -> None:
    results, counts, messages = found([1e-3] * 4, 1e6)
    assert [each.connections for each in results] == [1] * 4
    assert (counts, messages) == ([1], [5] * 4)
    assert not results[0].times_s


@pytest.mark.parametrize(("trip_s", "most"), [(0.01, 41), (0.05, 21), (0.1, 19), (0.3, 14)])
@pytest.mark.parametrize("windows", [0.1, 1, 2, 8])
def test_the_longer_the_round_trip_the_fewer_messages(trip_s: float, most: int, windows: float) -> None:
    results, _counts, messages = found([trip_s, trip_s], windows * WINDOW_BYTES / trip_s)
    assert results[0].connections == max(1, windows)
    assert messages[0] == messages[1] <= most


def test_readings_that_disagree_are_outvoted_by_two_more() -> None:
    rate = 2 * WINDOW_BYTES / 0.05
    results, _counts, [usual, _] = found([0.05, 0.05], rate)
    tried_again = []
    for late in range(8, usual):  # whichever message of those that count
        delayed, _counts, [messages, _] = found([0.05, 0.05], rate, delays_s=[0.0] * late + [0.4])
        assert delayed[0].connections == results[0].connections == 2
        tried_again.append(messages - usual)
    assert 2 in tried_again
    assert max(tried_again) <= 4


def test_a_rank_that_waits_for_its_processor_is_not_far_away() -> None:
    results, counts, messages = found([1e-3] * 2, 1e9, delays_s=[0.02] * 13)
    assert (counts, messages) == ([1], [15] * 2)
    assert [each.round_trip_s for each in results] == [pytest.approx(1e-3, rel=0.01)] * 2


def test_the_slowest_link_counts_on_all_ranks() -> None:
    results, _counts, _messages = found([1e-4, 1e-4, 0.08], 1e9)
    assert results[0] == results[1] == results[2]
    assert results[0].connections == 8
    assert results[0].round_trip_s == pytest.approx(0.08, rel=0.01)


def test_where_there_can_be_no_more_it_is_what_there_are() -> None:
    results, counts, _messages = found([0.05, 0.05], 1e9, most=2)
    assert results[0].connections == 2
    assert counts == [1, 2, 4]


def test_it_says_how_long_a_message_took() -> None:
    [first, _], _counts, _messages = found([0.05, 0.05], 2 * WINDOW_BYTES / 0.05)
    assert str(first).startswith("connections per link: 2 (round trip of 50.0 ms: ")
    assert "s over 1, " in str(first)
    assert "over 4" in str(first)
