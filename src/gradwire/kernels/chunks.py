"""Selection by chunks of a tensor: strided ones (x[j::chunks]) or neighbouring elements."""

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
    """Number of indices that `chunk_topk_indices` returns for x (numel,) in `chunks` chunks, `keep` of each.

    >>> chunk_topk_count(5, 3, 1), chunk_topk_count(5, 3, 2)
    (3, 5)
    """
    rows, longer = divmod(numel, chunks)
    return longer * min(keep, rows + 1) + (chunks - longer) * min(keep, rows)


@contract(_keeps_some)
def chunk_topk_indices(x: Tensor, chunks: int, keep: int) -> Tensor:
    """Ascending int64 indices of the `keep` largest magnitudes of each chunk x[j::chunks], for all j <
    chunks.

    A chunk with fewer elements gives all of them. Ties go to the lowest index. NaN and Inf count as the
    largest.

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
    """Ascending int64 indices where |ahead| reaches the largest |x| of its chunk of `chunk` neighbours.

    x and `ahead` are (n,). The largest element of x in a chunk is always included, and zeros of x never are.
    In a chunk of x with NaN or Inf, only places where x or `ahead` is NaN or Inf are.

    >>> x = torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0])
    >>> indices_near_maxima(x, 2 * x, 3)
    tensor([1, 2])
    """
    chunk = min(chunk, max(x.numel(), 1))
    own, tested = (_in_chunks(t.abs().masked_fill(t.isnan(), torch.inf), chunk) for t in (x, ahead))
    largest = own.amax(1, keepdim=True)
    return (((own >= largest) | (tested >= largest)) & (own > 0)).view(-1).nonzero().view(-1)


def _in_chunks(magnitude: Tensor, chunk: int) -> Tensor:
    """Reshape `magnitude` (n,) to (chunks, chunk); the last chunk is padded with -1, below all magnitudes."""
    return torch.nn.functional.pad(magnitude, (0, -magnitude.numel() % chunk), value=-1.0).view(-1, chunk)
