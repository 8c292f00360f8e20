"""The protocol of exchanges, which turn ranks' gradients into their mean, and their steady traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.kernels.layouts import CodedPieces, ShardedBlocks
from gradwire.laws import Laws, formerly
from gradwire.memory import Memory
from gradwire.step.context import ExchangeContext, ExchangeState, Part

WHOLE = 0
"""The `grain` of an exchange whose units must hold whole parameters."""

Finish = Callable[[], None]
"""Waits for the last round and decodes it. Local: it must not issue a collective."""


if not TYPE_CHECKING:
    __getattr__ = formerly(__name__, "ExchangeLaws")


class Exchange(Protocol):
    """The way in which ranks agree on the mean of one unit.

    One whose rounds are not the same in all steps may also have a method `phase(ctx)`, so that they are not
    asked for in each: see `gradwire.laws.phase_of`.
    """

    @property
    def laws(self) -> Laws: ...

    @property
    def memory(self) -> Memory | None:
        """The memory that takes the unsent part; `None` if nothing is remembered."""
        ...

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Finish:
        """Encode and issue all rounds of one unit, waiting for all of them but the last.

        `x` (numel,) arrives as the error-fed gradient. When the returned function has been called, `x`
        is what was left unsent and `mean` (numel,) is what every rank applies, bit-identical on all.
        """
        ...

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        """The collectives that `start` will issue, in order; a function of its arguments alone.

        Rounds marked `at_most` may be shorter, by sizes that ranks agree on in earlier rounds. After a rank
        has taken part in that agreement, it issues them even if its own encode fails: only the exchange knows
        their sizes.

        An empty tuple means that nothing travels: the mean is zero and `x` stays as it is, so the caller may
        leave out `start`.
        """
        ...


class Coder(Protocol):
    """Codes shards of a segment of a unit, one after another in x (numel,), as `rows` (world, size).

    See `gradwire.exchange.scatter_reduce`.
    """

    def encode(self, x: Tensor, rows: Tensor, ctx: ExchangeContext) -> None:
        """Write the code of each shard of `x` to its row. `x` keeps what the codes do not carry."""

    def average(
        self, rank: int, rows: Tensor, room: Tensor, unsent: Tensor | None, ctx: ExchangeContext
    ) -> Tensor:
        """The code (size,) of the mean of all `rows`, each of which codes the shard of `rank`, this one.

        What it does not carry is added to `unsent` (shard,), as many times as there are ranks, unless there
        is none. `rows` and `room` (shard,) are scratch, and may be the memory of what is returned.
        """

    def decode(self, rows: Tensor, out: Tensor, ctx: ExchangeContext) -> None:
        """out (numel,) = the means that all owners have coded."""


class RowCoder(Coder, Protocol):
    """One whose rows are those of a table, so that gradients can be coded as they come."""

    @property
    def table(self) -> ShardedBlocks: ...

    def fold(
        self,
        working: Tensor,
        committed: Tensor | None,
        grad: Tensor,
        coefficient: float,
        scale: float,
        coded: CodedPieces,
        room: Tensor,
        marks: Tensor,
    ) -> None:
        """Fold and encode a bucket, for whatever rows: see `gradwire.kernels.blocks.fold_blocks`."""

    def land(self, rows: Tensor, places: Sequence[Tensor], factor: float, marks: Tensor) -> None:
        """As `decode`, times `factor`, to `places`: see `gradwire.kernels.blocks.land_shards`."""


def parts(whole: object) -> Iterator[object]:
    """An exchange, codec or selector, followed by all its parts, outermost first.

    A part is a value of a dataclass field that has `laws`.

    >>> from gradwire.codec.select.topk import top_k
    >>> from gradwire.codec.sparse import sparse
    >>> from gradwire.exchange.compose import remember
    >>> from gradwire.exchange.payloads import gather
    >>> [type(part).__name__ for part in parts(remember(gather(sparse(top_k(0.01)))))]
    ['Scheme', 'Gather', 'Sparse', 'TopK']
    """
    yield whole
    if is_dataclass(whole):
        for value in (getattr(whole, each.name, None) for each in fields(whole)):
            for part in value if isinstance(value, tuple) else (value,):
                if hasattr(part, "laws"):
                    yield from parts(part)


def run(exchange: Exchange, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> None:
    """Start and finish in one go, for tests and for callers that have nothing to overlap."""
    exchange.start(x, mean, comm, ctx)()


CYCLE = 840
"""The least number of steps that holds whole cycles of every interval up to 8."""
STEADY = 1248 * CYCLE
"""A committed step after every warm-up, in which cycles begin, and rank 0 of four leads."""


def steady_rounds(exchange: Exchange, numel: int, world: int) -> tuple[Round, ...]:
    """The rounds of a unit in the steady state: after every warm-up, in a step in which it does not rest.

    >>> from gradwire.exchange.dense import dense
    >>> from gradwire.exchange.compose import every
    >>> [each.verb for each in steady_rounds(every(4, dense()), 1000, 2)]
    ['all_reduce']
    """
    step = first_busy_step(exchange, numel, world)
    return exchange.rounds(numel, torch.float32, steady_context(numel, world, step))


def steady_context(numel: int, world: int, step: int, kept: ExchangeState | None = None) -> ExchangeContext:
    """The context in `step` of a unit that is one matrix, as square as powers of two allow."""
    columns = 1 << (max(numel, 1).bit_length() - 1) // 2
    shape = (numel // columns, columns) if numel % columns == 0 else (numel, 1)
    part = Part("weight", shape, 0, numel)
    return ExchangeContext(step, 0, 0, world, parts=(part,), kept=kept or ExchangeState())


def first_busy_step(exchange: Exchange, numel: int, world: int) -> int:
    """The first step of the steady state in which rank 0 does not rest; `STEADY` if it always does."""
    for step in range(STEADY, STEADY + CYCLE):
        if exchange.rounds(numel, torch.float32, steady_context(numel, world, step)):
            return step
    return STEADY
