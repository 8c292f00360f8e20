"""The table that rides on the last all-reduce."""

from __future__ import annotations

import pytest
import torch

from gradwire.comm import Comm, run_ranks
from gradwire.comm.base import DIRECT_WORLD
from gradwire.control.controller import TOLD
from gradwire.control.forecast import main_buffer
from gradwire.errors import PeerFailed, RanksDisagree
from gradwire.measure.metered import MeteredComm
from gradwire.planning.tuning import USUAL, Tuning
from gradwire.step.status_vote import (
    HEADER,
    RankReport,
    SmallReduce,
    StatusVote,
    VoteApart,
    Votes,
    fingerprint,
)
from tests.support.rig import Outcome, Rig, gradients

FINE = RankReport(finite=True, failed=False, fingerprint=7)


def _sent(regions: list[torch.Tensor], row: RankReport, comm: Comm) -> StatusVote:
    tail = StatusVote(regions, row, MeteredComm(comm), torch.device("cpu"))
    tail.send()
    return tail


def _status_vote(*rows: RankReport) -> Votes:
    return Votes(rows)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_rank_reads_every_row_exactly(world: int) -> None:
    rows = [
        RankReport(rank != 1, rank == 2, 2**24 - 1 - rank, (rank / 8, float(rank)), rank == 3, rank / 4)
        for rank in range(world)
    ]

    def rank(comm: Comm) -> Votes:
        tail = _sent([torch.ones(3)], rows[comm.rank], comm)
        return tail.votes()

    assert run_ranks(world, rank) == world * [Votes(tuple(rows))]


def test_a_table_that_travels_by_itself_is_exact_whatever_type_is_the_default(default_type: None) -> None:
    rows = [RankReport(True, False, 2**24 - 1 - rank, (1e6 + rank,)) for rank in range(2)]

    def rank(comm: Comm) -> Votes:
        metered = MeteredComm(comm)
        tail = VoteApart([], rows[comm.rank], metered, torch.device("cpu"), control=metered)
        tail.send()
        return tail.votes()

    assert run_ranks(2, rank) == 2 * [Votes(tuple(rows))]


def test_a_nan_in_a_small_gradient_does_not_touch_the_table() -> None:
    def rank(comm: Comm) -> tuple[Votes, bool]:
        tail = _sent([torch.full((3,), torch.nan)], FINE, comm)
        return tail.votes(), tail.is_finite()

    assert run_ranks(2, rank) == 2 * [(_status_vote(FINE, FINE), False)]


def test_small_gradients_of_any_short_type_come_back_as_means() -> None:
    def rank(comm: Comm) -> list[list[float]]:
        regions = [
            torch.full((2,), comm.rank + 1.0),
            torch.full((1,), comm.rank + 3.0, dtype=torch.float16),
            torch.empty(0, dtype=torch.bfloat16),
        ]
        tail = _sent(regions, FINE, comm)
        tail.votes()
        tail.land()
        return [region.tolist() for region in regions]

    assert run_ranks(2, rank) == 2 * [[[1.5, 1.5], [3.5], []]]


def test_gradients_stay_as_they_are_until_the_means_land() -> None:
    def rank(comm: Comm) -> list[float]:
        region = torch.full((2,), comm.rank + 1.0)
        _sent([region], FINE, comm).votes()
        return region.tolist()

    assert run_ranks(2, rank) == [[1.0, 1.0], [2.0, 2.0]]


def test_small_gradients_travel_without_a_status_vote_too() -> None:
    def rank(comm: Comm) -> tuple[list[float], bool]:
        regions = [torch.full((2,), comm.rank + 1.0), torch.full((1,), comm.rank + 3.0)]
        small = SmallReduce(regions, MeteredComm(comm), torch.device("cpu"))
        small.send()
        small.wait()
        small.land()
        return torch.cat(regions).tolist(), small.is_finite()

    assert run_ranks(2, rank) == 2 * [([1.5, 1.5, 3.5], True)]


def test_all_well_is_no_error() -> None:
    assert _status_vote(FINE, FINE).error() is None
    assert _status_vote(FINE, FINE).finite


def test_one_rank_with_nan_makes_the_step_not_finite() -> None:
    assert not _status_vote(FINE, RankReport(False, False, 7), FINE).finite


def test_failed_ranks_are_named() -> None:
    error = _status_vote(FINE, RankReport(True, True, 7), RankReport(True, True, 7)).error()
    assert isinstance(error, PeerFailed)
    assert "rank 1, 2 failed" in str(error)


def test_different_plans_are_a_disagreement_even_when_a_rank_failed() -> None:
    error = _status_vote(FINE, RankReport(True, True, 8)).error()
    assert isinstance(error, RanksDisagree)
    assert "[7, 8]" in str(error)


def test_a_plan_number_is_exact_in_float32_and_sees_every_part() -> None:
    numbers = {fingerprint(step, text) for step in range(50) for text in ("dense", "topk")}
    assert len(numbers) == 100
    assert all(torch.tensor(float(number), dtype=torch.float32).item() == number for number in numbers)


def test_a_tail_goes_direct_from_three_ranks_on_by_a_tree_among_many_and_counts_its_bytes() -> None:
    def rank(comm: Comm) -> tuple[str, float, float]:
        step = Rig(comm, "topk(ratio=0.1)").step(gradients(comm.rank, 0)).step
        return step.trace.rounds[-1].verb, step.sent.metered_bytes, step.sent.predicted_bytes

    ways = ((2, "all_reduce"), (3, "all_reduce/direct"), (DIRECT_WORLD + 1, "all_reduce/tree"))
    for world, verb in ways:
        for found, metered, predicted in run_ranks(world, rank):
            assert found == verb
            assert metered == predicted


def test_many_small_gradients_do_not_travel_with_the_status_vote() -> None:
    def rank(comm: Comm, tuning: Tuning = USUAL) -> Outcome:
        return Rig(comm, "topk(ratio=0.1)", tuning=tuning).step(gradients(comm.rank, 0))

    together = run_ranks(3, rank)
    assert [len(each.step.flight.small) for each in together] == [1] * 3
    less = Tuning(riding_bytes=4 * (59 + 1 + 61) - 1)
    apart, row = run_ranks(3, lambda comm: rank(comm, less)), HEADER + 4 + TOLD  # 4 of the link
    for one, other in zip(together, apart, strict=True):
        many, votes = other.step.flight.small
        assert (many.buffer.numel(), votes.buffer.numel()) == (59 + 1 + 61, 3 * row)
        assert torch.equal(one.flat(), other.flat())
        assert other.step.sent.metered_bytes == other.step.sent.predicted_bytes == one.step.sent.metered_bytes


@pytest.mark.parametrize(("elements", "way"), [(1500, "direct"), (1600, "library")])
def test_up_to_six_kilobytes_of_small_gradients_go_direct_among_four_ranks_as_is_foreseen(
    elements: int, way: str
) -> None:
    shapes = {"norm": (elements,), "weight": (64, 64)}

    def rank(comm: Comm) -> tuple[list[str], str]:
        rig = Rig(comm, "topk(ratio=0.1)", shapes=shapes)
        step = rig.step(
            {name: torch.ones(torch.Size(of).numel()) for name, of in shapes.items()}, [tuple(shapes)]
        ).step
        assert step.sent.metered_bytes == step.sent.predicted_bytes
        foreseen = main_buffer(rig.reducer.layout, rig.reducer.specs, ()).small(comm.world)
        return [each.algorithm for each in step.flight.small], foreseen.algorithm

    assert run_ranks(4, rank) == 4 * [([way, "direct"], way)]


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("dense", 5 * [False]),
        ("covap(interval=2)", [*4 * [False], True]),
        ("int8", [*4 * [False], True]),
        ("topk(ratio=0.1)", 5 * [True]),
    ],
)
def test_the_status_vote_waits_for_decoders_that_may_refuse_and_in_every_fifth_step(
    text: str, waits: list[bool]
) -> None:
    # On threads a collective has ended when it is issued, and what follows it is a job of its own.
    def rank(comm: Comm) -> list[bool]:
        rig, found = Rig(comm, text, unit_elements=1000), []
        for number in range(len(waits)):
            step = rig.step(gradients(comm.rank, number)).step
            assert step.committed
            decoded_s = max(span.stop_s for span in step.trace.spans if span.what == "decode")
            found.append(step.trace.rounds[-1].start_s > decoded_s)
        return found

    assert run_ranks(2, rank) == 2 * [waits]
