"""Exactly k elements from a threshold that somebody guessed.

Payloads have a size that all ranks know beforehand, and room that is paid for carries something: what a
threshold leaves free takes further elements, and what it lets in beyond k is cut to the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels import indices_reaching, topk_indices


def filled(indices: Tensor, k: int, numel: int, start: int = 0) -> Tensor:
    """Ascending `indices` (count,) within 0 … numel - 1 and the lowest that are not among them: (k,) int64.

    With `start`, those that are not among them are taken from the `start`-th on. Work is O(k) at most:
    the j-th place that is free lies behind all indices i[p] with i[p] - p <= j, so everything from the
    first place taken to the last is one run without a gap. Raises if there are fewer than k places.

    >>> filled(torch.tensor([1, 6]), 4, 9), filled(torch.tensor([1, 6]), 4, 9, start=4)
    (tensor([0, 1, 2, 6]), tensor([1, 5, 6, 7]))
    """
    need = k - indices.numel()
    if not 0 <= need <= numel - indices.numel() - start:
        raise ValueError(f"{indices.numel()} indices and {numel} places from {start} on do not give k={k}")
    if need == 0:
        return indices
    free_before = indices - torch.arange(indices.numel(), device=indices.device)
    wanted = torch.tensor([start, start + need - 1], device=indices.device)
    before, within = torch.searchsorted(free_before, wanted, right=True).tolist()
    run = torch.arange(start + before, start + need + within, device=indices.device)
    return torch.cat([indices[:before], run, indices[within:]])


def exactly(x: Tensor, threshold: float, k: int) -> Tensor:
    """k indices (k,) int64, ascending: the largest of x (numel,) as far as they reach the threshold.

    Where more than k reach it, the k largest, which are the top k of everything. Where fewer do, all of
    them, filled up. Where not even half of k do, the threshold is worthless, and the top k is chosen
    instead: so the ⌈k/2⌉ largest are always among them, and γ = 1 - ⌈k/2⌉/numel.

    >>> x = torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0])
    >>> exactly(x, 1.5, 2), exactly(x, 2.5, 3), exactly(x, 3.5, 3)
    (tensor([1, 3]), tensor([0, 1, 3]), tensor([1, 3, 4]))
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    # Room for twice as many: beyond that a second look at everything costs less than the list.
    capacity = 2 * k
    found = indices_reaching(x, threshold, capacity)
    if found.numel() > capacity or 2 * found.numel() < k:
        return topk_indices(x, k)
    return filled(largest_of(x, found, k), k, x.numel())


def largest_of(x: Tensor, indices: Tensor, k: int) -> Tensor:
    """Those of `indices`, ascending, with the k largest magnitudes; all of them if there are no more.

    >>> largest_of(torch.tensor([5.0, 1.0, 3.0]), torch.tensor([1, 2]), 1)
    tensor([2])
    """
    return indices if indices.numel() <= k else indices[topk_indices(x[indices], k)]
