"""Passes that look at each chunk of a tensor alone: of elements far apart, or of neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract


def _keeps_some(x: Tensor, chunks: int, keep: int) -> None:
    if chunks < 1 or keep < 1:
        raise ValueError(f"chunks={chunks} and keep={keep} must be 1 or more")


def _is_one_shape(x: Tensor, ahead: Tensor, chunk: int) -> None:
    if chunk < 1 or x.shape != ahead.shape:
        raise ValueError(f"chunk={chunk} must be 1 or more, and {ahead.shape} be {x.shape}")


def chunk_topk_count(numel: int, chunks: int, keep: int) -> int:
    """The number of indices that `chunk_topk_indices` returns of x (numel,).

    >>> chunk_topk_count(5, 3, 1), chunk_topk_count(5, 3, 2)
    (3, 5)
    """
    rows, longer = divmod(numel, chunks)
    return longer * min(keep, rows + 1) + (chunks - longer) * min(keep, rows)


@contract(_keeps_some)
def chunk_topk_indices(x: Tensor, chunks: int, keep: int) -> Tensor:
    """Indices int64, ascending, of the `keep` largest magnitudes of each x[j::chunks], for all j < chunks.

    Of a chunk that has fewer, all of them. Ties go to the lowest index; NaN and Inf count as the largest of
    all.

    >>> chunk_topk_indices(torch.tensor([1.0, -3.0, 2.0, 0.0, 5.0]), 3, 1)  # of 1 and 0, of -3 and 5, of 2
    tensor([0, 2, 4])
    """
    magnitude = x.abs().masked_fill(x.isnan(), torch.inf)
    # Rows of one element of each chunk; the last is padded with -1, which is below everything.
    rows = torch.nn.functional.pad(magnitude, (0, -x.numel() % chunks), value=-1.0).view(-1, chunks)
    places = torch.sort(rows, dim=0, descending=True, stable=True).indices[:keep]
    indices = places * chunks + torch.arange(chunks, device=x.device)
    # Places beyond the end come last.
    return indices.view(-1).sort().values[: chunk_topk_count(x.numel(), chunks, keep)]


@contract(_is_one_shape)
def indices_near_maxima(x: Tensor, ahead: Tensor, chunk: int) -> Tensor:
    """Indices int64, ascending, where |ahead| reaches the largest |x| of the chunk; both are (n,).

    The largest of x itself is among them, zeros of x never are; where NaN or Inf is the largest, only such.

    >>> x = torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0])
    >>> indices_near_maxima(x, 2 * x, 3)
    tensor([1, 2])
    """
    chunk = min(chunk, max(x.numel(), 1))
    own, tested = (_in_chunks(t.abs().masked_fill(t.isnan(), torch.inf), chunk) for t in (x, ahead))
    largest = own.amax(1, keepdim=True)
    return (((own >= largest) | (tested >= largest)) & (own > 0)).view(-1).nonzero().view(-1)


def _in_chunks(magnitude: Tensor, chunk: int) -> Tensor:
    """`magnitude` (n,) as (chunks, chunk), the last one padded with -1, which is below everything."""
    return torch.nn.functional.pad(magnitude, (0, -magnitude.numel() % chunk), value=-1.0).view(-1, chunk)
