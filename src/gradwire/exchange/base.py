"""Protocols of exchanges, which turn the ranks' gradients into their mean, and their rounds in the
steady state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.kernels.layouts import ShardedBlocks
from gradwire.laws import Laws, formerly
from gradwire.memory import Memory
from gradwire.unit.context import ExchangeContext, ExchangeState, Part

Decode = Callable[[], None]
"""Function that waits for the last round and decodes it. It must not issue a collective."""

Start = Callable[[Tensor, Tensor, Comm, ExchangeContext], Decode]
"""`Exchange.start` of one exchange."""


if not TYPE_CHECKING:
    __getattr__ = formerly(__name__, "ExchangeLaws")


class Exchange(Protocol):
    """Method by which ranks agree on the mean of a unit.

    If its rounds differ between steps, it may have a method `phase(ctx)`, so that they are computed once per
    phase: see `gradwire.laws.phase_of`.
    """

    @property
    def laws(self) -> Laws: ...

    @property
    def memory(self) -> Memory | None:
        """The memory that takes the unsent part; `None` if nothing is remembered."""
        ...

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """Encode x and issue all rounds of the unit; wait for all of them but the last.

        Args:
            x: (numel,), the gradient plus the memory; becomes the unsent part.
            mean: (numel,), written: the mean, bit-identical on all ranks.
            comm, ctx: the ranks, and where and when this happens.

        Returns a function that decodes; x and `mean` are final once it has been called.
        """
        ...

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        """The collectives that `start` will issue, in order, for a unit of `numel` elements of type `dtype`
        in the step of `ctx`. They depend on these arguments alone.

        Rounds marked `at_most` may be shorter, by sizes that ranks agree on in earlier rounds. After a rank
        has taken part in that agreement, it issues them even if its own encoder fails: only the exchange
        knows their sizes.

        An empty tuple means that the unit rests: the mean is zero and x stays as it is, so that the caller
        need not call `start`.
        """
        ...


class ShardCoder(Protocol):
    """Codec for all shards of a segment, which lie one after another in x (numel,). Each is a row of `rows`
    (world, size).

    See `gradwire.exchange.scatter_reduce`.
    """

    def encode(self, x: Tensor, rows: Tensor, ctx: ExchangeContext) -> None:
        """Encode each shard of x (numel,) into its row of `rows` (world, size), in the step and unit of
        `ctx`. x keeps the rounding errors.
        """

    def average(
        self, rank: int, rows: Tensor, room: Tensor, unsent: Tensor | None, ctx: ExchangeContext
    ) -> Tensor:
        """Average `rows`, which all encode this rank's shard, and encode the mean.

        Args:
            rank: this rank, and the number of its shard.
            rows: (world, size), one from each rank; may be overwritten.
            room: scratch memory (elements of the shard,).
            unsent: `None`, or (elements of the shard,): receives the rounding error of the mean, times the
                number of ranks.
            ctx: where and when this happens.

        Returns the encoded mean (size,), which may lie in `rows` or `room`.
        """

    def decode(self, rows: Tensor, out: Tensor, ctx: ExchangeContext) -> None:
        """Decode the means of all shards, one per row of `rows` (world, size), into `out` (numel,). `ctx` is
        that of `encode`.
        """


class RowCoder(ShardCoder, Protocol):
    """A coder whose rows have a layout known beforehand (`table`), so that gradients can be encoded as they
    arrive, by `gradwire.kernels.blocks.compensate_blocks`, and means decoded to where they belong, by
    `land_shards` there.
    """

    @property
    def table(self) -> ShardedBlocks: ...


def parts(whole: object) -> Iterator[object]:
    """Yield an exchange, codec or selector, and then all its parts, outermost first.

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
    """Start an exchange and decode at once, for callers that have nothing to overlap. A collective; the
    arguments are those of `Exchange.start`, and x and `mean` are final on return.
    """
    exchange.start(x, mean, comm, ctx)()


CYCLE = 840
"""Smallest number of steps that is a multiple of every interval up to 8."""
STEADY = 1248 * CYCLE
"""Step after every warm-up, in which all cycles begin, and rank 0 of four leads."""


def steady_rounds(exchange: Exchange, numel: int, world: int) -> tuple[Round, ...]:
    """Rounds of a unit of `numel` float32 elements among `world` ranks in the steady state: in a step after
    every warm-up, in which it does not rest.

    >>> from gradwire.exchange.dense import dense
    >>> from gradwire.exchange.compose import every
    >>> [each.verb for each in steady_rounds(every(4, dense()), 1000, 2)]
    ['all_reduce']
    """
    step = first_busy_step(exchange, numel, world)
    return exchange.rounds(numel, torch.float32, steady_context(numel, world, step))


def steady_context(numel: int, world: int, step: int, kept: ExchangeState | None = None) -> ExchangeContext:
    """Context of a unit of `numel` elements in `step`, on rank 0 of `world`, with the exchange's own state
    `kept`. The unit is one matrix, as square as powers of two allow.
    """
    columns = 1 << (max(numel, 1).bit_length() - 1) // 2
    shape = (numel // columns, columns) if numel % columns == 0 else (numel, 1)
    part = Part("weight", shape, 0, numel)
    return ExchangeContext(step, 0, 0, world, parts=(part,), kept=kept or ExchangeState())


def first_busy_step(exchange: Exchange, numel: int, world: int) -> int:
    """First step of the steady state in which a unit of `numel` elements does not rest on rank 0 of `world`;
    `STEADY` if it always rests.
    """
    for step in range(STEADY, STEADY + CYCLE):
        if exchange.rounds(numel, torch.float32, steady_context(numel, world, step)):
            return step
    return STEADY
