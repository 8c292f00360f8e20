"""The largest of every chunk of neighbours: each part of a unit has its share, each block of values a chunk.

Sarfi et al. 2025, "Communication efficient LLM pre-training with SparseLoCo", arXiv 2508.15706, chooses so.
Where few of each chunk are kept, neighbours hold little of the top-k, because they are alike: see
`gradwire.codec.select.rates` for chunks of elements that lie far apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.kernels.chunks import chunk_topk_indices
from gradwire.kernels.topk import topk_indices
from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class ChunkTopK:
    """Selector of the `keep` largest magnitudes of each `chunk` consecutive elements; ties go to the lowest
    index.

    A last chunk that is shorter keeps at most its elements. The unsent part is at most 1 - keep/chunk of the
    squared norm, chunk by chunk.

    >>> x = torch.tensor([1.0, -3.0, 2.0, 0.0, 5.0])
    >>> ChunkTopK(2, 1).select(x, ExchangeContext(step=0, unit=0, rank=0, world=1))
    tensor([1, 2, 4])
    """

    chunk: int
    keep: int
    laws = Laws(contractive=True, fixed_size=True, stays_on_device=True, fixed_rounds=True, repeats=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        full, rest = divmod(numel, self.chunk)
        return full * self.keep + min(self.keep, rest)

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        full, rest = divmod(x.numel(), self.chunk)
        parts = []
        if full:
            # The kernel's chunks are a stride apart, so the same element of all chunks comes first.
            across = x[: full * self.chunk].view(full, self.chunk).t().reshape(-1)
            found = ctx.kernels[chunk_topk_indices](across, full, self.keep)
            parts.append((found % full * self.chunk + found // full).sort().values)
        if rest or not full:
            last = ctx.kernels[topk_indices](x[full * self.chunk :], min(self.keep, rest))
            parts.append(last + full * self.chunk)
        return torch.cat(parts)
