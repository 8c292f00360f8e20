"""The largest of each parameter at a rate of its own: exactly, or the largest of each of its chunks.

ScaleCom (Chen et al. 2020, section 4): rates by a layer's multiply-adds per weight, and chunk-wise sorting,
which takes the same work for every element. The paper sorts chunks in parallel to find the leader's top-k. Of
how many elements a chunk is, and how many of them are sent, it does not say.

Neighbours in a gradient are alike, because they belong to one output. If chunks were neighbours, the largest
of each would hold a third of the energy of the top-k. So the elements of a chunk are far apart: chunk j of C
has the elements j, j + C, j + 2C, …. C is odd, because with a divisor of a row's length a chunk would be a
column of the weight. With one of each chunk the choice then holds nine tenths of the top-k's energy, with
four 0.97 (`benchmarks/results/2026-11-25-scalecom-choice.md`).

Difference from the paper: a parameter that a boundary divides has a choice of its own in each of the two
units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.kernels.chunks import chunk_topk_count, chunk_topk_indices
from gradwire.kernels.dispatch import Kernels
from gradwire.kernels.topk import topk_indices
from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class RatedTopK:
    """Selector of the largest magnitudes of each piece, one in `rate` elements; ties go to the lowest index.

    With `keep`, the `keep` largest of each chunk are chosen: a piece has numel/(keep·rate) chunks, rounded up
    to an odd number. `rates` maps glob patterns of parameter names to rates, and the first match counts;
    `rate` applies to other parameters, and to pieces without names. The unsent part is at most 1 -
    1/max(rates) of the squared norm.
    """

    rate: int
    rates: tuple[tuple[str, int], ...] = ()
    keep: int | None = None
    laws = Laws(contractive=True, fixed_size=True, stays_on_device=True, fixed_rounds=True, repeats=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return sum(self._count(size, rate) for size, rate in self._pieces(numel, ctx))

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        start, parts = 0, []
        for size, rate in self._pieces(x.numel(), ctx):
            parts.append(self._choice(x[start : start + size], rate, ctx.kernels) + start)
            start += size
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pieces(self, numel: int, ctx: ExchangeContext) -> Iterator[tuple[int, int]]:
        """Pairs (elements, rate) of the unit's pieces."""
        names = [part.name for part in ctx.parts] or [""]
        for name, size in zip(names, ctx.sizes(numel), strict=True):
            yield size, _rate_of(name, self.rates, self.rate)

    def _count(self, numel: int, rate: int) -> int:
        if self.keep is None:
            return -(-numel // rate)
        return chunk_topk_count(numel, _chunks(numel, rate * self.keep), self.keep)

    def _choice(self, x: Tensor, rate: int, kernels: Kernels) -> Tensor:
        if self.keep is None:
            return kernels[topk_indices](x, self._count(x.numel(), rate))
        # The kernel has room for so many, and no chunk has more elements than x.
        return kernels[chunk_topk_indices](
            x, _chunks(x.numel(), rate * self.keep), min(self.keep, max(x.numel(), 1))
        )


def _chunks(numel: int, length: int) -> int:
    """Number of chunks of at most `length` elements; odd, if there are enough elements."""
    return max(min(-(-numel // length) | 1, numel), 1)


@lru_cache(maxsize=1 << 16)
def _rate_of(name: str, rates: tuple[tuple[str, int], ...], rate: int) -> int:
    return next((found for pattern, found in rates if fnmatchcase(name, pattern)), rate)


def rated_top_k(rate: int, rates: Mapping[str, int] | None = None, keep: int | None = None) -> RatedTopK:
    """Keep the largest 1/`rate` of each parameter, or the `keep` largest of each of its chunks.

    `rates` are by patterns over parameter names.

    Raises `ValueError` unless rates and `keep` are whole numbers from 1 on.

    >>> from gradwire.unit.context import Part
    >>> x = torch.tensor([1.0, -3.0, 2.0, 0.0, 5.0, 1.0, 4.0])
    >>> parts = Part("conv.weight", (4,), 0, 4), Part("fc.weight", (3,), 0, 3)
    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1, parts=parts)
    >>> rated_top_k(100, {"conv.*": 2}).select(x, ctx)
    tensor([1, 2, 4])
    >>> rated_top_k(100, {"conv.*": 2}, keep=1).select(x, ctx)  # of 1 and 0, of -3, of 2; of all in fc.weight
    tensor([0, 1, 2, 4])
    """
    for name, found in {"rate": rate, "keep": 1 if keep is None else keep, **(rates or {})}.items():
        if not isinstance(found, int) or found < 1:
            raise ValueError(f"{name}={found!r} must be a whole number from 1 on; a rate of 100 sends 1 %")
    return RatedTopK(rate, tuple((rates or {}).items()), keep)
