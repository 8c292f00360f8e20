"""Exactly k elements from a threshold that is a guess: by a sample, a fit, or what the last step left.

Payloads have a size that all ranks know beforehand. What a threshold leaves free is filled up with further
elements, since it is paid for; what it lets in beyond k is cut to the largest.

`ReusedThreshold` needs no guess: gradients change slowly, so a threshold serves for several steps (Li and
Hoefler 2022, "Near-optimal sparse allreduce for distributed deep learning", section 3.1.3). Differences from
the paper: the threshold is not kept for a fixed number of steps, it is read off the memory. After a choice of
the largest, the largest that is left is the threshold. So nothing has to be saved beside the memory, and it
follows the gradient by itself: it rises when too many reach it, because the smallest of them stay, and falls
when too few do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.kernels.dispatch import LOOKING, Kernels
from gradwire.kernels.draws import stratified_indices
from gradwire.kernels.threshold import indices_reaching
from gradwire.kernels.topk import topk_indices
from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext


def fill_up_from(start: int, indices: Tensor, k: int, numel: int) -> Tensor:
    """Add free places to ascending `indices` (count,), within 0 … numel - 1, up to k: (k,) int64, ascending.

    Free places are taken from the `start`-th on; after the last comes the first. Work is O(k): the j-th free
    place lies after all indices i[p] with i[p] - p <= j, so all from the first place taken to the last are
    one run without a gap. Raises `ValueError` if there are fewer than k places.

    >>> fill_up_from(4, torch.tensor([1, 6]), 4, 9), fill_up_from(6, torch.tensor([1, 6]), 4, 9)
    (tensor([1, 5, 6, 7]), tensor([0, 1, 6, 8]))
    """
    need, free = k - indices.numel(), numel - indices.numel()
    if not 0 <= need <= free or not 0 <= start <= max(free - 1, 0):
        raise ValueError(f"{indices.numel()} indices and {numel} places from {start} on do not give k={k}")
    if need == 0:
        return indices
    beyond = start + need - free
    if beyond > 0:
        return fill_up_from(0, fill_up_from(start, indices, k - beyond, numel), k, numel)
    free_before = indices - torch.arange(indices.numel(), device=indices.device)
    wanted = torch.tensor([start, start + need - 1], device=indices.device)
    before, within = torch.searchsorted(free_before, wanted, right=True).tolist()
    run = torch.arange(start + before, start + need + within, device=indices.device)
    return torch.cat([indices[:before], run, indices[within:]])


def random_start(places: int, ctx: ExchangeContext) -> int:
    """Draw one of `places` places uniformly; every rank draws its own."""
    return int(torch.randint(places, (), generator=ctx.private(), device="cpu"))


def fill_up(indices: Tensor, k: int, numel: int, ctx: ExchangeContext) -> Tensor:
    """Add free places to ascending `indices` (count,), within 0 … numel - 1, up to k, as `fill_up_from` does.
    They begin at a free place that this rank draws uniformly.
    """
    free = numel - indices.numel()
    return fill_up_from(random_start(free, ctx), indices, k, numel) if free else indices


def exactly(x: Tensor, threshold: float, k: int, ctx: ExchangeContext) -> Tensor:
    """Select exactly k elements by a threshold of the magnitude. Returns indices (k,) int64, ascending.

    - If k elements or more reach the threshold, the k largest are selected: the exact top k.
    - If at least half of k reach it, all of them are selected, and others from a random place on to make k.
      Then γ = 1 - k/numel in the mean, because those others are average elements.
    - If fewer reach it, the threshold is useless, and the exact top k are selected.

    So γ is at most 1 - ⌈k/2⌉/numel in every step.

    >>> x, ctx = torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0]), ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> exactly(x, 1.5, 2, ctx), exactly(x, 2.5, 3, ctx), exactly(x, 3.5, 3, ctx)
    (tensor([1, 3]), tensor([0, 1, 3]), tensor([1, 3, 4]))
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    # Room for twice as many: beyond that a second look at everything costs less than the list.
    capacity = 2 * k
    found = ctx.kernels[indices_reaching](x, threshold, capacity)
    if found.numel() > capacity or 2 * found.numel() < k:
        return ctx.kernels[topk_indices](x, k)
    if found.numel() >= k:
        return largest_of(x, found, k, ctx.kernels)
    return fill_up(found, k, x.numel(), ctx)


def largest_of(x: Tensor, indices: Tensor, k: int, kernels: Kernels = LOOKING) -> Tensor:
    """Those k of `indices` (count,), ascending, at which x (numel,) has the largest magnitudes; all of them
    if k is no less than count.

    >>> largest_of(torch.tensor([5.0, 1.0, 3.0]), torch.tensor([1, 2]), 1)
    tensor([2])
    """
    return indices if indices.numel() <= k else indices[kernels[topk_indices](x[indices], k)]


def threshold_of_sample(x: Tensor, size: int, rank: int, ctx: ExchangeContext) -> float:
    """The `rank`-th largest magnitude of `size` elements of x, drawn from the private generator.

    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> threshold_of_sample(torch.tensor([1.0, -3.0, 2.0]), size=3, rank=2, ctx=ctx)
    2.0
    """
    seed = int(torch.randint(2**62, (1,), generator=ctx.private(), device="cpu"))
    drawn = x[stratified_indices(x.numel(), size, seed).to(x.device)]
    largest = ctx.kernels[topk_indices](drawn, rank)
    return float(drawn[largest].abs().nan_to_num(torch.inf, torch.inf).min())


@dataclass(frozen=True)
class ReusedThreshold:
    """Selector of the elements that reach the largest unsent magnitude; of the exact top-k if nothing
    is unsent.
    """

    ratio: float
    laws = Laws(contractive=True, fixed_size=True, fixed_rounds=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return count_kept(self.ratio, numel)

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        """Select by `ctx.unsent` (numel,), the memory before this step."""
        k = self.count(x.numel(), ctx)
        if ctx.unsent is None or k == 0:
            return ctx.kernels[topk_indices](x, k)
        threshold = float(torch.linalg.vector_norm(ctx.unsent, torch.inf))
        return exactly(x, threshold, k, ctx) if threshold > 0.0 else ctx.kernels[topk_indices](x, k)


def reused_threshold(ratio: float) -> ReusedThreshold:
    """Keep about the share `ratio` with the largest magnitudes, by the threshold that the last step's memory
    gives.

    >>> import torch
    >>> ctx = ExchangeContext(step=1, unit=0, rank=0, world=1, unsent=torch.tensor([0.0, 0.5, 0.4, 0.1]))
    >>> reused_threshold(0.5).select(torch.tensor([3.0, 0.6, 0.4, 0.2]), ctx)
    tensor([0, 1])
    """
    return ReusedThreshold(check_ratio(ratio))
