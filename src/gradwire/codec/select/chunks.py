"""The largest of each few elements: constant work per element, and no threshold to find.

ScaleCom (Chen et al. 2020, section 4: chunk-wise sorting). The paper leaves the number per chunk open: one
of every 1/ratio elements is our reading, more than one of a longer chunk an option.

Differences from the paper: chunks run through the whole unit, across parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.codec.select.base import SelectorLaws, check_ratio
from gradwire.kernels import chunk_topk_indices
from gradwire.moment import Moment


@dataclass(frozen=True)
class ChunkTopK:
    """The `keep` largest magnitudes of each `chunk` elements; among equals the lowest index.

    Of the last chunk, which may be shorter, as many as it has: what is left is at most 1 - keep/chunk of the
    squared norm, chunk by chunk.
    """

    chunk: int
    keep: int = 1
    laws = SelectorLaws(contractive=True, fixed_size=True)

    def count(self, numel: int, at: Moment) -> int:
        full, rest = divmod(numel, self.chunk)
        return full * self.keep + min(self.keep, rest)

    def select(self, x: Tensor, at: Moment) -> Tensor:
        return chunk_topk_indices(x, self.chunk, self.keep)


def chunk_top_k(ratio: float, keep: int = 1) -> ChunkTopK:
    """Keep the `keep` largest of every round(keep / ratio) elements.

    With `keep` = 1 the share is 1, 1/2, 1/3, …: choose a larger one for a ratio near 1.

    >>> import torch
    >>> x = torch.tensor([1.0, -3.0, 2.0, 0.0, 5.0])
    >>> chunk_top_k(0.5).select(x, Moment(step=0, unit=0, rank=0, world=1))
    tensor([1, 2, 4])
    """
    if keep < 1:
        raise ValueError(f"keep={keep} is not 1 or more; it is the number of elements kept per chunk")
    return ChunkTopK(max(keep, round(keep / check_ratio(ratio))), keep)
