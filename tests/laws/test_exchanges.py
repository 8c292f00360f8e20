"""What holds for every exchange, on every world, size and type, whatever the gradients are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, Pending, Round, ThreadComm, owe_zeros, run_ranks
from gradwire.comm.base import DONE
from gradwire.contrib.sketchsgd import Sketch
from gradwire.exchange.base import run
from gradwire.kernels.range import LARGEST_SUM
from gradwire.measure.metered import MeteredComm
from tests.laws.cases import EXCHANGES, F32, ExchangeCase
from tests.laws.rows import Held, Outcome, Performed, Row, groups, perform, perform_all
from tests.support.bits import bits
from tests.support.gradients import KINDS, Kind, coded
from tests.support.looped import looped, try_all
from tests.support.rounds import allows
from tests.support.where import WHERE

GROUPS = groups()


@pytest.fixture(scope="module", params=GROUPS)
def performed(request: pytest.FixtureRequest) -> Performed:
    """What the rows of one group did."""
    return perform_all(GROUPS[request.param])


def every_row(law: Callable[[Outcome], None]) -> Callable[[Performed], None]:
    """A test of all rows of a group that could be performed."""

    @wraps(law)
    def test(performed: Performed) -> None:
        try_all(law, [{"outcome": each} for each in performed.outcomes])

    del test.__wrapped__  # type: ignore[attr-defined]  # pytest would ask it what it takes
    return test


def test_every_row_can_be_performed(performed: Performed) -> None:
    if performed.failure is not None:
        raise performed.failure


def test_a_row_that_fails_is_named_and_the_others_have_outcomes() -> None:
    def unlucky(*_: object) -> Tensor:
        raise Accident("out of luck")

    lucky = Row(EXCHANGES[0], 1, 7, F32, coded, (0, 0))
    failing = replace(lucky, kind=unlucky)
    found = perform_all([failing, lucky])
    assert [outcome.row for outcome in found.outcomes] == [lucky]
    assert str(found.failure) == f"1 of 2 rows fail\nrow={failing}: Accident: out of luck"
    assert perform_all([lucky]).failure is None


by_kind = partial(looped, "case", by=lambda case: case.kind)


@every_row
def test_mean_is_bit_identical_on_all_ranks(outcome: Outcome) -> None:
    first, *others = (bits(held.mean) for held in outcome.ranks)
    assert all(other == first for other in others)


@every_row
def test_nothing_is_lost(outcome: Outcome) -> None:
    if conserves(outcome):
        came, missing = imbalance(outcome)
        excess = missing - tolerance(outcome.row, came)
        assert not excess.numel() or excess.max() <= 0, f"{missing.max()} beyond rounding"


def conserves(outcome: Outcome) -> bool:
    """Whether it is declared; where elements are rounded together, NaN spreads among them."""
    finite = all(x.isfinite().all() for x in outcome.inputs)
    return outcome.row.case.exchange.laws.conserves and (finite or not outcome.row.case.coarse)


def imbalance(outcome: Outcome) -> tuple[Tensor, Tensor]:
    """Per element: the mean magnitude that came in, and |avg x − (mean + avg unsent)|.

    Of the elements that are finite on all ranks: another's NaN must not spread to them.
    """
    before = torch.stack(outcome.inputs).double()
    unsent = torch.stack([held.unsent for held in outcome.ranks]).double()
    mean = outcome.ranks[0].mean.double()
    finite = before.isfinite().all(0)
    missing = before.mean(0) - (mean + unsent.mean(0))
    # A result that is not finite is missing altogether; a comparison with NaN would be false.
    return before.abs().mean(0)[finite], missing.abs().nan_to_num(torch.inf, torch.inf)[finite]


def tolerance(row: Row, came: Tensor) -> Tensor:
    """What W + 4 roundings of the accumulating type can do to the mean magnitude M = avg|x_r|.

    Roundings on an element's way: of 1/W, of the product with it, W − 1 of the sum, two of
    unsent = x − W·payload, one to spare; each of at most u = eps/2 relative to a partial sum below
    M·(1 + u)^n, and n of them make n·u/(1 − n·u) (Higham, Accuracy and Stability, lemma 3.1). Below the
    normal range a rounding errs by at most one smallest subnormal instead. Where payloads are summed in
    a narrower type, u is that type's (sums of subnormals are exact in any). The test itself takes three
    means in float64: 3W + 3 roundings more. A GPU's atomic sums, torch's `index_add_` among them, take what
    is below the normal range of float32 for zero (PTX ISA, `red`): up to W + 1 times.
    """
    n = row.world + 4
    own = torch.finfo(row.dtype)
    u = max(own.eps, torch.finfo(row.case.sums_in or row.dtype).eps) / 2
    test = (3 * row.world + 3) * torch.finfo(torch.float64).eps / 2
    if row.case.coarse:
        n += row.case.coarse
        came = torch.full_like(came, float(came.max()) * row.world if came.numel() else 0.0)
    flushed = 0.0 if WHERE.type == "cpu" else (row.world + 1) * torch.finfo(torch.float32).smallest_normal
    return came * (n * u / (1 - n * u) + test) + n * own.smallest_normal * own.eps + flushed


@every_row
def test_rounds_are_those_that_were_announced(outcome: Outcome) -> None:
    row = outcome.row
    for rank, held in enumerate(outcome.ranks):
        announced = row.case.exchange.rounds(row.size, row.dtype, row.context(rank))
        assert all(allows(a, b) for a, b in zip(announced, held.rounds, strict=False))
        assert all(left.at_most for left in announced[len(held.rounds) :])
        assert len(held.rounds) <= len(announced)


@every_row
def test_without_rounds_the_mean_is_zero_and_everything_stays(outcome: Outcome) -> None:
    row = outcome.row
    for rank, held in enumerate(outcome.ranks):
        if not row.case.exchange.rounds(row.size, row.dtype, row.context(rank)):
            assert not held.mean.any()
            assert bits(held.unsent) == bits(outcome.inputs[rank])


@every_row
def test_nothing_around_the_unit_is_written(outcome: Outcome) -> None:
    assert all(held.surroundings_intact for held in outcome.ranks)


@every_row
def test_shapes_and_types_stay(outcome: Outcome) -> None:
    for held in outcome.ranks:
        for tensor in (held.mean, held.unsent):
            assert (tensor.shape, tensor.dtype) == ((outcome.row.size,), outcome.row.dtype)


@every_row
def test_global_generators_are_not_touched(outcome: Outcome) -> None:
    assert outcome.generators_intact


@every_row
def test_same_inputs_at_the_same_moment_give_the_same_bits(outcome: Outcome) -> None:
    if WHERE.type != "cpu" and isinstance(outcome.row.case.exchange, Sketch):
        return  # a sketch is summed by atomics there, in any order
    for held, again in zip(outcome.ranks, perform(outcome.row).ranks, strict=True):
        assert bits(held.mean) == bits(again.mean)
        assert bits(held.unsent) == bits(again.unsent)


@every_row
def test_declared_in_place_gives_the_same_mean_where_it_came_from(outcome: Outcome) -> None:
    if not outcome.row.case.exchange.laws.in_place:
        return  # the others promise nothing
    for held, there in zip(outcome.ranks, perform(outcome.row, in_place=True).ranks, strict=True):
        assert bits(held.mean) == bits(there.mean)
        assert there.surroundings_intact


@every_row
def test_finite_gradients_give_a_finite_mean_unless_overflow_is_declared(outcome: Outcome) -> None:
    if all(x.isfinite().all() for x in outcome.inputs):
        # Where overflow is declared, the inputs are within the payload's range.
        assert all(held.mean.isfinite().all() for held in outcome.ranks)


def sending(case: ExchangeCase) -> tuple[int, int]:
    """The first step from 12 on, after every warm-up of the table, in which unit 0 travels; and the unit."""
    rows = (Row(case, 3, 50, F32, coded, (step, 0)) for step in range(12, 24))
    return next(row.time for row in rows if case.exchange.rounds(row.size, row.dtype, row.context(0)))


@by_kind([case for case in EXCHANGES if case.exchange.laws.may_overflow])
def test_declared_overflow_happens(case: ExchangeCase) -> None:
    def largest(rank: int, size: int, dtype: torch.dtype, *_: object) -> Tensor:
        return torch.full((size,), torch.finfo(dtype).max)

    # Large enough for a matrix whose rows add up; whether they do so along a random direction is a draw.
    means = [perform(Row(case, 1, 4096, F32, largest, (12 * n, 0))).ranks[0].mean for n in (1, 2, 3, 4, 5)]
    assert any(not mean.isfinite().any() for mean in means)


def everywhere(value: float) -> Kind:
    """All of one magnitude, with signs that differ between ranks."""

    def signed(rank: int, size: int, dtype: torch.dtype, *_: object) -> Tensor:
        return torch.where((torch.arange(size) + rank) % 3 == 0, -value, value).to(dtype)

    return signed


@by_kind(EXCHANGES)
def test_what_may_be_remembered_overflows_only_where_the_mean_shows_it(case: ExchangeCase) -> None:
    # All of a memory plus gradient that is just small enough: what is left has room, or all ranks see it.
    just_below = LARGEST_SUM * (1 - torch.finfo(F32).eps)
    for held in perform(Row(case, 3, 4096, F32, everywhere(just_below), sending(case))).ranks:
        if case.exchange.laws.may_overflow and not held.mean.isfinite().all():
            continue
        assert held.mean.isfinite().all()
        assert held.unsent.isfinite().all()


@by_kind([case for case in EXCHANGES if case.exchange.laws.conserves and not case.coarse], few=1)
@looped("world", [1, 2, 4])
def test_integers_on_worlds_of_a_power_of_two_are_conserved_to_the_last_bit(
    case: ExchangeCase, world: int
) -> None:
    # x/W and every sum are multiples of 1/4 below 256: exact even in bfloat16, so the tolerance is zero.
    for time in ((0, 0), (1, 0), sending(case)):
        _, missing = imbalance(perform(Row(case, world, 200, F32, coded, time)))
        assert missing.max() == 0


@by_kind([case for case in EXCHANGES if not case.exchange.laws.conserves])
def test_what_does_not_conserve_says_so_with_reason(case: ExchangeCase) -> None:
    _, missing = imbalance(perform(Row(case, 3, 200, F32, KINDS[1], sending(case))))
    assert missing.max() > 1e-3


@by_kind(EXCHANGES)
def test_only_those_that_declare_it_ask_the_optimizer_and_lose_nothing_without_one(
    case: ExchangeCase,
) -> None:
    row, asked = Row(case, 3, 200, F32, KINDS[1], sending(case)), list[str]()

    def body(comm: ThreadComm) -> Held:
        def without_optimizer(name: str) -> None:
            asked.append(name)

        x = row.inputs()[comm.rank]
        mean = torch.empty_like(x)
        context = replace(row.context(comm.rank), replicas=without_optimizer)
        run(case.exchange, x, mean, comm, context)
        return Held(mean, x, [], surroundings_intact=True)

    found = Outcome(row, row.inputs(), run_ranks(3, body), generators_intact=True)
    assert bool(asked) == case.exchange.laws.asks_optimizer
    if asked:
        came, missing = imbalance(found)
        assert (missing <= tolerance(row, came)).all()


@by_kind(EXCHANGES)
def test_finish_issues_nothing(case: ExchangeCase) -> None:
    row = Row(case, 3, 50, F32, coded, sending(case))

    def body(comm: ThreadComm) -> tuple[int, int]:
        x, metered = row.inputs()[comm.rank], MeteredComm(comm)
        decode = case.exchange.start(x, torch.empty_like(x), metered, row.context(comm.rank))
        issued = len(metered.rounds)
        decode()
        return issued, len(metered.rounds)

    for issued, in_the_end in run_ranks(3, body):
        assert issued == in_the_end


class Replacing(Comm):
    """A comm whose last collective ends with any bytes; those before it end as they should."""

    def __init__(self, comm: Comm, last: int, brought: torch.Generator) -> None:
        self._comm, self._left, self._brought = comm, last, brought
        self.rank, self.world = comm.rank, comm.world

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        pending, self._left = self._comm.issue(round_, tensor, out), self._left - 1
        if self._left:
            return pending
        pending.wait()
        flat = out.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, generator=self._brought, dtype=torch.uint8))
        return DONE


@by_kind([case for case in EXCHANGES if case.exchange.laws.total])
def test_a_total_decoder_takes_whatever_has_come(case: ExchangeCase) -> None:
    row = Row(case, 2, 300, F32, coded, sending(case))
    last = len(case.exchange.rounds(row.size, row.dtype, row.context(0)))

    def body(comm: ThreadComm, seed: int) -> Tensor:
        x, mean = row.inputs()[comm.rank], torch.zeros(row.size, device=WHERE)
        brought = torch.Generator().manual_seed(seed)
        decode = case.exchange.start(x, mean, Replacing(comm, last, brought), row.context(comm.rank))
        before = x.clone()
        decode()
        assert bits(x) == bits(before)  # what stays unsent is known before the status vote
        return mean

    for seed in range(8):
        one, other = run_ranks(2, partial(body, seed=seed))
        assert bits(one) == bits(other)


class Accident(Exception):
    """What an encoder may raise."""


class Failing(Comm):
    """A comm whose rank fails when it is about to issue its n-th round."""

    def __init__(self, comm: MeteredComm, at: int) -> None:
        self._comm, self._at = comm, at
        self.rank, self.world = comm.rank, comm.world

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        if len(self._comm.rounds) == self._at:
            raise Accident
        return self._comm.issue(round_, tensor, out)


@by_kind(EXCHANGES, few=2)
@looped("failing", [0, 1, 2])
def test_peers_of_a_rank_that_fails_before_any_round_read_its_zeros(case: ExchangeCase, failing: int) -> None:
    row = Row(case, 3, 200, F32, coded, sending(case))
    agreed = case.exchange.rounds(row.size, row.dtype, row.context(0))

    def body(comm: ThreadComm, at: int) -> list[Round]:
        x, metered, context = row.inputs()[comm.rank], MeteredComm(comm), row.context(comm.rank)
        if comm.rank == failing:
            with pytest.raises(Accident):
                case.exchange.start(x, torch.empty_like(x), Failing(metered, at), context)
            owe_zeros(metered, agreed[len(metered.rounds) :], x.device)
        else:
            run(case.exchange, x, torch.empty_like(x), metered, context)
        return metered.rounds

    # What has agreed on sizes pays by itself for what fails later: tests/unit/exchange.
    sizes_are_known = not any(round_.at_most for round_ in agreed)
    for at in range(len(agreed) if sizes_are_known else 1):
        for issued in run_ranks(3, lambda comm, at=at: body(comm, at)):
            assert all(allows(a, b) for a, b in zip(agreed, issued, strict=False))
            assert all(round_.at_most for round_ in agreed[len(issued) :])
