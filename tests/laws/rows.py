"""Which combinations are tried, and what one of them did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product
from random import Random
from typing import Any

import torch
from torch import Tensor

from gradwire.comm import Round, ThreadComm, run_ranks
from gradwire.exchange.base import run
from gradwire.kernels.dispatch import Kernels
from gradwire.measure.metered import MeteredComm
from gradwire.unit.context import ExchangeContext, Replicated
from tests.laws.cases import BF16, EXCHANGES, F16, F32, F64, ExchangeCase
from tests.laws.pairwise import all_pairs
from tests.support.bits import global_generators
from tests.support.depth import FEW, FULL, seed
from tests.support.gradients import KINDS, Kind, generator
from tests.support.looped import RowsFail, try_all
from tests.support.where import WHERE

WORLDS = (1, 2, 3, 4, 5, 7)
# 40 009 is a prime beyond the size at which the fast top-k samples its threshold.
SIZES = (0, 1, 2, 7, 127, 1000, 4097, 40_009)
DTYPES = (F32, F64, F16, BF16)
# (step, unit): before and after a warm-up; in and out of phase for intervals 2, 3 and 4.
TIMES = ((0, 0), (1, 0), (2, 1), (4, 0), (5, 3), (12, 0))
COARSE_STEPS = {
    "lr": 2.0**-16,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
}
"""Of an optimizer that sees no difference below 2^-8 in a gradient if parameters are 1."""


@dataclass(frozen=True)
class Row:
    """One combination."""

    case: ExchangeCase
    world: int
    size: int
    dtype: torch.dtype
    kind: Kind
    time: tuple[int, int]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        step, unit = self.time
        return f"{self.case}, W={self.world}, n={self.size}, {dtype}, {self.kind.__name__}, s={step} t={unit}"

    def inputs(self) -> list[Tensor]:
        """Every rank's gradient."""
        # What the range of a narrow payload holds, or nearly the end of the type's own.
        overflows = self.case.exchange.laws.may_overflow
        large = 2.0**14 if overflows else torch.finfo(self.dtype).max / 16
        return [
            self.kind(rank, self.size, self.dtype, generator(str(self), rank), large).to(WHERE)
            for rank in range(self.world)
        ]

    def context(self, rank: int) -> ExchangeContext:
        """Where and when, with something that the last step has left."""
        draw = generator(str(self), rank + 1000)
        unsent = torch.randn(self.size, generator=draw) if self.time[0] else torch.zeros(self.size)
        unsent = unsent.to(WHERE, self.dtype)
        seen = Replicated(torch.ones(self.size, device=WHERE), COARSE_STEPS, {}, torch.optim.SGD)
        return ExchangeContext(
            *self.time,
            rank,
            self.world,
            seed=7,
            unsent=unsent,
            replicas=lambda _name: seen,
            kernels=Kernels(WHERE, self.dtype),
        )


@dataclass(frozen=True)
class Held:
    """What one rank holds after the step."""

    mean: Tensor
    unsent: Tensor
    rounds: list[Round]
    surroundings_intact: bool


@dataclass(frozen=True)
class Outcome:
    """What a row did."""

    row: Row
    inputs: list[Tensor]
    ranks: list[Held]
    generators_intact: bool

    def __str__(self) -> str:
        return str(self.row)


MARGIN, MARK = 3, 123.0


def perform(row: Row, in_place: bool = False) -> Outcome:
    """One step of the row's exchange on threads; `x` and `mean` lie within larger memory, as units do."""
    inputs, before = row.inputs(), global_generators()

    def body(comm: ThreadComm) -> Held:
        source = inputs[comm.rank]
        memory = torch.full((2, source.numel() + 2 * MARGIN), MARK, dtype=row.dtype, device=WHERE)
        x, mean = memory[:, MARGIN : MARGIN + source.numel()]
        x.copy_(source)
        mean.fill_(torch.nan)  # an exchange that forgets to clear it shows
        metered = MeteredComm(comm)
        run(row.case.exchange, x, x if in_place else mean, metered, row.context(comm.rank))
        margins = torch.cat([memory[:, :MARGIN], memory[:, MARGIN + source.numel() :]])
        return Held(x if in_place else mean, x, metered.rounds, bool((margins == MARK).all()))

    ranks = run_ranks(row.world, body)
    return Outcome(row, inputs, ranks, before == global_generators())


@dataclass(frozen=True)
class Performed:
    """What several rows did. `failure` names those of which nothing came."""

    outcomes: list[Outcome]
    failure: RowsFail | None = None


def perform_all(rows: Iterable[Row]) -> Performed:
    """Perform each row, whatever becomes of the others."""
    found: list[Outcome] = []
    try:
        try_all(lambda row: found.append(perform(row)), [{"row": row} for row in rows])
    except RowsFail as failure:
        return Performed(found, failure)
    return Performed(found)


def groups() -> dict[str, list[Row]]:
    """The rows to try, by the kind of exchange; all of them by exchange, world and type."""
    if FULL:
        bundles = [list(_bundle(*key)) for key in product(EXCHANGES, WORLDS, DTYPES)]
        return {str(bundle[0]): bundle for bundle in bundles}
    levels = (EXCHANGES, WORLDS, SIZES, DTYPES, KINDS, TIMES)
    rows = few(levels[1:]) if FEW else (Row(*row) for row in all_pairs(levels, seed()))
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case.kind, []).append(row)
    return found


def few(levels: Sequence[Sequence[Any]]) -> Iterator[Row]:
    """A row of each exchange. Any two values of other factors meet in some row."""
    cases = list(EXCHANGES)
    Random(seed()).shuffle(cases)
    others = (row for number in count() for row in all_pairs(levels, seed() + number))
    return (Row(case, *row) for case, row in zip(cases, others, strict=False))


def _bundle(case: ExchangeCase, world: int, dtype: torch.dtype) -> Iterable[Row]:
    for number, (size, kind) in enumerate(product(SIZES, KINDS)):
        yield Row(case, world, size, dtype, kind, TIMES[number % len(TIMES)])
