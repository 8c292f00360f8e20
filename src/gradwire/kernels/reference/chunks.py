"""Passes that look at each chunk of a tensor alone."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import checked


def _keeps_some(x: Tensor, chunk: int, keep: int) -> None:
    if not 1 <= keep <= chunk:
        raise ValueError(f"keep={keep} is outside 1 … chunk={chunk}")


def _is_one_shape(x: Tensor, ahead: Tensor, chunk: int) -> None:
    if chunk < 1 or x.shape != ahead.shape:
        raise ValueError(f"chunk={chunk} must be 1 or more, and {ahead.shape} be {x.shape}")


@checked(_keeps_some)
def chunk_topk_indices(x: Tensor, chunk: int, keep: int) -> Tensor:
    """Indices int64, ascending, of the `keep` largest magnitudes of each `chunk` elements of x (n,).

    Of the last chunk, which may be shorter, as many as it has. Ties go to the lowest index; NaN and Inf
    count as the largest of all.

    >>> chunk_topk_indices(torch.tensor([1.0, -3.0, 2.0, 0.0, 5.0]), 2, 1)
    tensor([1, 2, 4])
    """
    chunk = min(chunk, max(x.numel(), 1))
    magnitude = _in_chunks(x.abs().masked_fill(x.isnan(), torch.inf), chunk)
    places = torch.sort(magnitude, dim=1, descending=True, stable=True).indices[:, :keep].sort(dim=1).values
    starts = torch.arange(0, x.numel(), chunk, device=x.device)
    whole, rest = divmod(x.numel(), chunk)
    # Places of the last chunk that are beyond the end come last.
    return (starts[:, None] + places).view(-1)[: whole * keep + min(rest, keep)]


@checked(_is_one_shape)
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
