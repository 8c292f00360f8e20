"""Exactly k elements from a threshold that is a guess.

Payloads have a size that all ranks know beforehand, and room that is paid for carries something: what a
threshold leaves free takes further elements, and what it lets in beyond k is cut to the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels import indices_reaching, stratified_indices, topk_indices
from gradwire.moment import Moment


def filled_from(start: int, indices: Tensor, k: int, numel: int) -> Tensor:
    """Ascending `indices` (count,) within 0 … numel - 1, and free places up to k: (k,) int64, ascending.

    The free places are taken from the `start`-th on, and after the last comes the first. Work is O(k):
    the j-th free place lies behind all indices i[p] with i[p] - p <= j, so all from the first place taken
    to the last are one run without a gap. Raises if there are fewer than k places.

    >>> filled_from(4, torch.tensor([1, 6]), 4, 9), filled_from(6, torch.tensor([1, 6]), 4, 9)
    (tensor([1, 5, 6, 7]), tensor([0, 1, 6, 8]))
    """
    need, free = k - indices.numel(), numel - indices.numel()
    if not 0 <= need <= free or not 0 <= start <= max(free - 1, 0):
        raise ValueError(f"{indices.numel()} indices and {numel} places from {start} on do not give k={k}")
    if need == 0:
        return indices
    beyond = start + need - free
    if beyond > 0:
        return filled_from(0, filled_from(start, indices, k - beyond, numel), k, numel)
    free_before = indices - torch.arange(indices.numel(), device=indices.device)
    wanted = torch.tensor([start, start + need - 1], device=indices.device)
    before, within = torch.searchsorted(free_before, wanted, right=True).tolist()
    run = torch.arange(start + before, start + need + within, device=indices.device)
    return torch.cat([indices[:before], run, indices[within:]])


def start_of(places: int, at: Moment) -> int:
    """One of `places` places, all equally likely; every rank draws its own."""
    return int(torch.randint(places, (), generator=at.private(), device="cpu"))


def filled(indices: Tensor, k: int, numel: int, at: Moment) -> Tensor:
    """As `filled_from`, from a free place that this rank draws, all equally likely."""
    free = numel - indices.numel()
    return filled_from(start_of(free, at), indices, k, numel) if free else indices


def exactly(x: Tensor, threshold: float, k: int, at: Moment) -> Tensor:
    """k indices (k,) int64, ascending: the largest of x (numel,) as far as they reach the threshold.

    Where more than k reach it, the k largest, which are the top k of everything. Where fewer do, all of
    them, filled up from a random place: those that fill are then average ones, those that reach are above
    average, and γ = 1 - k/numel in the mean. Where not even half of k do, the threshold is worthless, and
    the top k is chosen instead: so γ = 1 - ⌈k/2⌉/numel in every single step.

    >>> x, at = torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0]), Moment(step=0, unit=0, rank=0, world=1)
    >>> exactly(x, 1.5, 2, at), exactly(x, 2.5, 3, at), exactly(x, 3.5, 3, at)
    (tensor([1, 3]), tensor([0, 1, 3]), tensor([1, 3, 4]))
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    # Room for twice as many: beyond that a second look at everything costs less than the list.
    capacity = 2 * k
    found = indices_reaching(x, threshold, capacity)
    if found.numel() > capacity or 2 * found.numel() < k:
        return topk_indices(x, k)
    if found.numel() >= k:
        return largest_of(x, found, k)
    return filled(found, k, x.numel(), at)


def largest_of(x: Tensor, indices: Tensor, k: int) -> Tensor:
    """Those of `indices`, ascending, with the k largest magnitudes; all of them if there are no more.

    >>> largest_of(torch.tensor([5.0, 1.0, 3.0]), torch.tensor([1, 2]), 1)
    tensor([2])
    """
    return indices if indices.numel() <= k else indices[topk_indices(x[indices], k)]


def threshold_of_sample(x: Tensor, size: int, rank: int, at: Moment) -> float:
    """The `rank`-th largest magnitude of `size` random elements of x; the private generator draws them.

    >>> at = Moment(step=0, unit=0, rank=0, world=1)
    >>> threshold_of_sample(torch.tensor([1.0, -3.0, 2.0]), size=3, rank=2, at=at)
    2.0
    """
    seed = int(torch.randint(2**62, (1,), generator=at.private()))
    drawn = x[stratified_indices(x.numel(), size, seed).to(x.device)]
    return float(drawn[topk_indices(drawn, rank)].abs().nan_to_num(torch.inf, torch.inf).min())
