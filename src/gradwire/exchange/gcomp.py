"""GComp: a ring all-reduce of frames that are lossless, or lose only what the optimizer would round off.

Li et al. 2024, "Near-lossless gradient compression for data-parallel distributed DNN training", sections 4 to
6. Every gradient is multiplied by 1/W and then summed around the ring, each hop decoding, adding and
encoding. An element is rounded W times on its way: in W − 1 partial sums and by the owner of the result. The
permitted loss of each rounding follows from δ (`gradwire.metric`) of the mean; of W·g it is W times as much.
Together they are less than W units in the last place of the parameter (in 16 bits much less), plus the
roundings of the sum, as without compression.

Order of sums, with partition p of W ranks: (((x_p + x_{p+1}) + x_{p+2}) + …) + x_{p+W−1}, indices modulo W,
and x_r already divided by W. Lossless that is the same as without frames, to the last bit; on two ranks it is
what DDP computes.

Differences from the paper:

- "near" sends no levels: thresholds follow from what all replicas hold, and cut as finely as a bit, down to
  zero; the paper ends at 18 bits. Frames carry a fingerprint of thresholds, so that a rank with other
  parameters is found out.
- "levels" is the paper's 0, 6, 12 and 18 bits. All modes round to nearest, "truncate" too; the paper
  truncates.
- One table per unit, of symbols summed over ranks in the same step and used from the next one on; it is built
  on a thread of its own. Counts travel with the gradient; the paper's travel while the network is idle. The
  first table is a guess for any gradient; the paper makes it offline from the model's. The counts are kept by
  parameter name, so that a checkpoint brings them along.
- The step that counts is drawn anew in each cycle of `refresh` steps, and older counts go on to weigh a
  quarter. A unit that has gradients in every second step only would otherwise get a table for zeros, or none
  for them. With both, a table fits all that the unit sends.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.codec.gcomp import (
    SYMBOLS,
    CodeTable,
    Key,
    begin_table,
    fingerprint,
    frame,
    largest_frame,
    rounded,
    table_of,
    unframe,
)
from gradwire.codec.gcomp.rounding import BASES, levels_of, may_flush
from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import Decode
from gradwire.exchange.dense import dense
from gradwire.exchange.ring import RingAllReduce, RingSchedule
from gradwire.exchange.round_robin import drawn_offset
from gradwire.exchange.state import COUNTED
from gradwire.kernels.terms import mantissa_levels
from gradwire.laws import Laws
from gradwire.metric import numerators, thresholds
from gradwire.unit.context import ExchangeContext

Mode = Literal["near", "levels", "lossless", "truncate"]
Tables = Literal["dynamic", "static"]

SEGMENT = 1 << 18
"""Elements of a segment; `benchmarks/compressed_ring.py --segment` compares sizes."""
REFRESH = 50
"""Steps for which the paper uses a table."""
OLDER = 4
"""Divisor of the weight of older counts. With 2, tables lag behind gradients that shrink: where these halve
in 60 steps, exponents take 12 % more bits, and 4 % with 4. With 8, exponents of a unit that rests in every
second step take 18 % more than with 4. (Normal numbers, tables alone.)"""

NEAR_LOSSLESS_SHARE = 0.45
"""Share of the announced bytes that near-lossless frames take. It depends on the values: in float32 0.54 to
0.59 was seen in training and 0.41 to 0.43 in tuning, in bfloat16 0.37 to 0.45; 0.33 and 0.37 are the
paper's, by levels and with many zeros."""

LOSSLESS_SHARE = 0.88
"""Share of the announced bytes that lossless frames take, as seen in the same places."""


@dataclass(frozen=True)
class Gcomp:
    """Ring all-reduce of GComp's frames; see `gcomp` for its options.

    With "truncate", `bits` counts from float32's 23 bits of mantissa; shorter mantissas lose as many fewer.
    Errors are measured in the type of x. float64, and a single rank, use a plain all-reduce.
    """

    mode: Mode = "near"
    bits: int = 18
    tables: Tables = "dynamic"
    refresh: int = REFRESH
    segment: int = SEGMENT
    memory = None

    @cached_property
    def laws(self) -> Laws:
        """Conserves if it is lossless. Otherwise the error is dropped: nothing is left to remember."""
        exact = self.mode == "lossless"
        return Laws(
            conserves=exact,
            contractive=exact,
            in_place=exact,
            asks_optimizer=self.mode in ("near", "levels"),
            travels=LOSSLESS_SHARE if exact else NEAR_LOSSLESS_SHARE,
            fixed_rounds=self.tables == "static",
        )

    def phase(self, ctx: ExchangeContext) -> Hashable:
        """True if symbols are counted in this step."""
        return self.renews(ctx)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """Issue shifts of lengths and frames, and in some steps an all-reduce of counts."""
        if not self._goes_around(x.dtype, ctx):
            return dense().start(x, mean, comm, ctx)
        torch.mul(x, 1.0 / comm.world, out=mean)
        if mean.data_ptr() != x.data_ptr():
            x.zero_()
        if x.numel() == 0:
            return lambda: None
        frames = Frames(self, mean.numel(), mean.dtype, ctx, self.renews(ctx))
        ring = RingAllReduce(mean, frames, comm, self.schedule(x.numel(), ctx))
        ring.start()
        pending = comm.all_reduce(frames.counts) if frames.counts is not None else None

        def decode() -> None:
            ring.finish()
            if pending is not None:
                pending.wait()
            for error in ring.failures:
                raise error
            frames.keep()

        return decode

    def schedule(self, numel: int, ctx: ExchangeContext) -> RingSchedule:
        """The ring's schedule for a unit of `numel` elements."""
        return RingSchedule(numel, ctx.world, self.segment)

    def _goes_around(self, dtype: torch.dtype, ctx: ExchangeContext) -> bool:
        return ctx.world > 1 and dtype != torch.float64

    def renews(self, ctx: ExchangeContext) -> bool:
        """True if this step counts symbols for the next table.

        One step in each cycle of `refresh` steps does, drawn from the shared seed. In the first cycle steps
        0, 1, 2, 4, 8, … do, because gradients change fastest there.
        """
        if self.tables == "static":
            return False
        cycle, place = divmod(ctx.step, self.refresh)
        if cycle == 0:
            return place & (place - 1) == 0
        return place == drawn_offset(ctx.seed, cycle, self.refresh, "table")

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        """The collectives; frames are announced at their largest size, that of incompressible data."""
        if not self._goes_around(dtype, ctx):
            return dense().rounds(numel, dtype, ctx)
        if numel == 0:
            return ()
        schedule = self.schedule(numel, ctx)
        counts = (Round("all_reduce", SYMBOLS, torch.int64),) if self.renews(ctx) else ()
        return schedule.rounds(largest_frame(schedule.longest_segment, dtype)) + counts


class Frames:
    """Framing of one unit in one step: see `gradwire.exchange.ring.Framing`.

    If `refreshes`, the symbols of all encoded elements are added to `counts` (SYMBOLS,).
    """

    def __init__(
        self, how: Gcomp, numel: int, dtype: torch.dtype, ctx: ExchangeContext, refreshes: bool
    ) -> None:
        self.counts = torch.zeros(SYMBOLS, dtype=torch.int64, device="cpu") if refreshes else None
        self._mode, self._bits = how.mode, max(0, how.bits - BASES[dtype])
        self._numel, self._dtype, self._at = numel, dtype, ctx
        self._kind, self._name = place_of(ctx)
        self._dynamic = how.tables == "dynamic"
        self._states: dict[tuple[int, int], int] = {}

    def bound(self, numel: int) -> int:
        return largest_frame(numel, self._dtype)

    def encode(self, x: Tensor, start: int, hop: int, room: Tensor) -> int:
        dropped, explicit, flush = self._dropped(x, start), self._mode == "levels", self._flushes(x, start)
        key = self._key(start, x.numel(), hop)
        data = frame(
            x, dropped, self._table, key, explicit=explicit, flush=flush, buffer=room, counts=self.counts
        )
        return data.numel()

    def round_trip(self, x: Tensor, start: int) -> None:
        if self._mode != "lossless":
            dropped, flush = self._dropped(x, start), self._flushes(x, start)
            x.copy_(rounded(x, dropped, flush, explicit=self._mode == "levels"))

    def decode(self, data: Tensor, out: Tensor, start: int, hop: int, add: bool) -> None:
        dropped = None if self._mode == "levels" else self._dropped(out, start)
        unframe(data, out, dropped, self._tables, self._key(start, out.numel(), hop), add=add)

    def keep(self) -> None:
        """Build the table for later steps from the counts of all ranks, with older ones at less weight."""
        if self.counts is not None:
            if (older := self._at.kept.get(self._kind, self._name)) is not None:
                self.counts += older // OLDER
            begin_table(self.counts)
            self._at.kept.put(self._kind, self._name, self.counts)

    def _dropped(self, x: Tensor, start: int) -> Tensor | int:
        here = slice(start, start + x.numel())
        match self._mode:
            case "near":
                return self._thresholds[here]
            case "levels":
                levels = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
                mantissa_levels(x.float(), self._numerators[here], levels)
                return levels.clamp_(max=levels_of(self._dtype)[-1])
            case "truncate":
                return self._bits
        return 0

    def _flushes(self, x: Tensor, start: int) -> bool:
        """True if numbers below the normal range become zero: if any loss is allowed here."""
        here = slice(start, start + x.numel())
        if not may_flush(self._dtype):
            return False
        match self._mode:
            case "near":
                return bool(self._thresholds[here].any())
            case "levels":
                return bool(self._numerators[here].any())
        return self._mode == "truncate"

    def _key(self, start: int, numel: int, hop: int) -> Key:
        place = start, numel
        if place not in self._states:
            held = torch.empty(0, dtype=torch.uint8, device="cpu")
            if self._mode == "near":
                held = self._thresholds[start : start + numel]
            # A partition that went astray is another state.
            self._states[place] = (fingerprint(held) + start) % 2**32
        unit = ((self._at.flat_buffer + 1) * 2**20 + self._at.unit) % 2**32
        return Key(self._at.step, unit, hop, self._states[place])

    @cached_property
    def _thresholds(self) -> Tensor:
        return thresholds(self._numel, self._at, self._dtype)

    @cached_property
    def _numerators(self) -> Tensor:
        return numerators(self._numel, self._at)

    @cached_property
    def _table(self) -> CodeTable:
        kept = self._at.kept.get(self._kind, self._name) if self._dynamic else None
        return prior(self._dtype) if kept is None else table_of(kept)

    @cached_property
    def _tables(self) -> Mapping[int, CodeTable]:
        return {self._table.id: self._table}


def place_of(ctx: ExchangeContext) -> tuple[str, str]:
    """Kind and name under which a unit's counts are kept: its first parameter, and where in it the unit
    begins.

    >>> place_of(ExchangeContext(step=0, unit=0, rank=0, world=1))
    ('symbols from 0', '')
    """
    start, name = (ctx.parts[0].start, ctx.parts[0].name) if ctx.parts else (0, "")
    return f"{COUNTED} from {start}", name


@lru_cache(maxsize=4)
def prior(dtype: torch.dtype) -> CodeTable:
    """Table for gradients that have not been counted yet; built once per type."""
    return CodeTable.prior(dtype)


def gcomp(mode: Mode = "near", bits: int = 18, tables: Tables = "dynamic", refresh: int = REFRESH) -> Gcomp:
    """A ring all-reduce of compressed frames. For all modes but "lossless" wrap it in `forget`.

    Args:
        mode: "near" drops bits of the mantissa that the optimizer's step would round off; "levels" drops them
            in the paper's steps of 6; "truncate" drops `bits` bits of every value; "lossless" drops none.
        bits: 1 … 23, for "truncate" only.
        tables: "dynamic" builds Huffman tables from counts of all ranks; "static" uses one table throughout.
        refresh: steps from one dynamic table to the next, at least 1.

    Raises `ValueError` for other values.
    >>> from gradwire.exchange.compose import forget
    >>> from gradwire.exchange.gcomp import gcomp
    >>> forget(gcomp("near")).laws.conserves, gcomp("lossless").laws.conserves
    (False, True)
    """
    for name, value, legal in (("mode", mode, Mode), ("tables", tables, Tables)):
        if value not in get_args(legal):
            raise ValueError(f"{name}={value!r} is none of {', '.join(get_args(legal))}")
    if not 1 <= bits <= 23:
        raise ValueError(f"bits={bits} cannot be dropped of 23 bits of mantissa; choose 1 … 23")
    if refresh < 1:
        raise ValueError(f"refresh={refresh} must be at least 1 step")
    return Gcomp(mode, bits, tables, refresh)
