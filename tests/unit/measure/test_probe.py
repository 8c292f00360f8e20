"""Probes find a link as it is, alike on all ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.comm import Pending, Round, ThreadComm, run_ranks
from gradwire.comm.checksums import CheckedComm
from gradwire.measure.probe import (
    OWN,
    VERBS,
    WIRE_BYTES,
    Probed,
    network_of,
    probe,
    shortest,
    slowest,
)
from gradwire.planning.collectives import Transfer, hops, payload_for, serial_bytes, time_of
from gradwire.planning.costs import Link, Network
from tests.support.damage import Damage, DamagingComm
from tests.support.looped import looped
from tests.unit.measure.links import SlowComm

ALPHA_S, BETA_S = 2e-3, 4e-8


def _probed(world: int, noise: float = 0.0, **options: float) -> list[tuple[Probed, ...]]:
    def rank(inner: ThreadComm) -> tuple[Probed, ...]:
        draw = random.Random(7)  # in step on all ranks
        late_s = 0.01 if inner.rank == world - 1 else 0.0
        comm = SlowComm(
            inner,
            ALPHA_S,
            BETA_S,
            late_s=late_s,
            started_s=1000.0 * inner.rank,
            noise=lambda: draw.uniform(1.0, 1.0 + noise),
        )
        return probe(comm, clock=comm.clock, **options)

    return run_ranks(world, rank)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_latency_and_bandwidth_are_found_though_a_rank_is_late_and_no_clock_is_set(world: int) -> None:
    for probed in _probed(world):
        assert [each.verb for each in probed] == list(VERBS)
        for each in probed:
            # Exact but for the late rank, who enters last: what is left are roundings of times near 1000 s.
            assert each.link.alpha_s == pytest.approx(ALPHA_S, rel=1e-6)
            assert each.link.beta_s == pytest.approx(BETA_S, rel=1e-6)


def test_messages_are_as_long_as_they_are_said_to_be_whatever_type_is_the_default(default_type: None) -> None:
    types = set[tuple[torch.dtype, torch.dtype]]()

    class Noting(SlowComm):
        def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
            if tensor.numel() > 1000:
                types.add((tensor.dtype, round_.dtype))
            return super().issue(round_, tensor, out)

    def rank(inner: ThreadComm) -> None:
        comm = Noting(inner, ALPHA_S, BETA_S)
        probe(comm, clock=comm.clock)

    run_ranks(2, rank)
    assert types == {(torch.float32, torch.float32)}


def test_all_ranks_get_the_same_numbers() -> None:
    assert len({repr(probed) for probed in _probed(3, noise=0.5)}) == 1


def test_disturbed_repetitions_do_not_count() -> None:
    # Medians of 7 of factors in 1 … 1.1; see test_fit for how far a line can be off: 2n·ε of a time.
    for each in _probed(2, noise=0.1)[0]:
        for x, _ in each.fit.points:
            true_s = hops(each.verb, 2) * ALPHA_S + x * BETA_S
            assert true_s <= each.fit.line(x) * 1.2
            assert each.fit.line(x) <= true_s * 1.2


def test_a_small_budget_leaves_out_large_sizes_but_never_the_two_smallest() -> None:
    (probed,) = {repr(each) for each in _probed(2, budget_s=0.0)}
    assert probed
    assert all(len(each.fit.points) == 2 for each in _probed(2, budget_s=0.0)[0])
    assert all(len(each.fit.points) == len(WIRE_BYTES) for each in _probed(2, budget_s=100.0)[0])


def _elapsed_s(**options: Any) -> tuple[float, int]:
    """How long a probe of all-reduces took, by the clock of the link, and how many points it has."""

    def rank(inner: ThreadComm) -> tuple[float, int]:
        comm = SlowComm(inner, ALPHA_S, BETA_S)
        start_s = comm.clock()
        (found,) = probe(comm, ["all_reduce"], clock=comm.clock, **options)
        return comm.clock() - start_s, len(found.fit.points)

    return run_ranks(2, rank)[0]


def test_what_a_size_took_is_missing_from_the_budget_of_the_next() -> None:
    alike = range(512, 4608, 512)  # each fits by itself
    whole_s, points = _elapsed_s(budget_s=100.0, wire_bytes=alike)
    half_s, fewer = _elapsed_s(budget_s=whole_s / 2, wire_bytes=alike)
    assert points == len(alike)
    assert 2 < fewer < points
    assert half_s < 0.75 * whole_s


def test_a_size_that_is_known_not_to_fit_is_not_tried() -> None:
    (tried_s, points), (known_s, as_many) = (_elapsed_s(budget_s=0.2, byte_s=each) for each in (0.0, BETA_S))
    assert points == as_many < len(WIRE_BYTES)
    assert known_s < tried_s - ALPHA_S


def test_where_latency_is_long_the_smallest_sizes_are_sent_a_few_times() -> None:
    smallest = WIRE_BYTES[:2]
    (few_s, points), (many_s, _) = (_elapsed_s(budget_s=each, wire_bytes=smallest) for each in (0.0, 100.0))
    assert points == 2
    assert few_s < 0.6 * many_s  # one by itself and three instead of seven, and what ranks tell each other


def test_other_verbs_are_taken_to_be_like_the_first() -> None:
    network = network_of(_probed(2)[0][:2])
    assert set(network.calibrated) == {"all_reduce", "all_gather"}
    assert network.of("broadcast") == network.calibrated["all_reduce"]


@pytest.mark.parametrize("name", OWN)
def test_all_reduces_of_our_own_have_links_of_their_own(name: str) -> None:
    def rank(inner: ThreadComm) -> Probed:
        comm = SlowComm(inner, ALPHA_S, BETA_S)
        (found,) = probe(comm, [name], clock=comm.clock)
        return found

    ranks = run_ranks(5, rank)
    assert len({repr(found) for found in ranks}) == 1
    assert ranks[0].link.alpha_s == pytest.approx(ALPHA_S, rel=1e-6)
    assert ranks[0].link.beta_s == pytest.approx(BETA_S, rel=1e-6)
    # The plan finds it by its name, and the library's keeps to its own.
    network = Network(Link(0.0, 0.0), network_of(ranks[:1]).calibrated)
    _, algorithm = name.split("/")
    sent = Transfer("all_reduce", 1e6, algorithm)
    expected = hops(name, 5) * ALPHA_S + serial_bytes(name, 1e6, 5) * BETA_S
    assert time_of(sent, 5, network) == pytest.approx(expected, rel=1e-6)
    assert time_of(Transfer("all_reduce", 1e6), 5, network) == 0.0


def test_alone_there_is_no_link() -> None:
    with pytest.raises(ValueError, match="needs two ranks"):
        run_ranks(1, probe)


def test_a_broadcast_cannot_be_timed() -> None:
    with pytest.raises(ValueError, match=r"verbs=\['broadcast'\]: can probe all_reduce"):
        run_ranks(2, lambda comm: probe(comm, ["broadcast"]))


def test_the_true_duration_is_that_of_the_rank_that_entered_last() -> None:
    table = [[0.5, 0.9, 0.2], [0.7, 0.3, 0.2]]
    assert run_ranks(2, lambda comm: shortest(comm, table[comm.rank])) == 2 * [[0.5, 0.3, 0.2]]
    assert run_ranks(2, lambda comm: slowest(comm, table[comm.rank])) == 2 * [[0.7, 0.9, 0.2]]


@looped("verb", [*VERBS, *OWN])
@looped("world", [2, 3, 4, 7])
def test_payloads_are_whole_numbers_of_every_rank_and_about_as_large_as_asked(verb: str, world: int) -> None:
    for size in WIRE_BYTES:
        payload = payload_for(verb, size, world)
        assert payload % (4 * world) == 0
        smallest = serial_bytes(verb, 4 * world, world)
        assert serial_bytes(verb, payload, world) == pytest.approx(size, abs=smallest)


def _struck(comm: ThreadComm) -> CheckedComm:
    """The first bit of every message that rank 1 receives is flipped."""
    return CheckedComm(DamagingComm(comm, Damage(-1, (0,), lasting=True) if comm.rank == 1 else Damage()))


@pytest.mark.parametrize("verb", VERBS)
def test_damage_of_what_is_only_timed_stops_no_rank(verb: str) -> None:
    sizes = (512, 4096, 32768)
    found = run_ranks(3, lambda comm: probe(_struck(comm), (verb,), wire_bytes=sizes, repetitions=2))
    assert found[0] == found[1] == found[2]


def test_many_numbers_travel_as_safely_as_few() -> None:
    found = run_ranks(3, lambda comm: slowest(_struck(comm), [float(comm.rank * n) for n in range(300)]))
    assert found == [[2.0 * n for n in range(300)]] * 3
