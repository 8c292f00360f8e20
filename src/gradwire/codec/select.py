"""Selectors: which elements travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradwire.kernels import sample_indices, topk_indices
from gradwire.moment import Moment


class Selector(Protocol):
    """Chooses elements of a unit.

    - `shared`: all ranks choose the same elements without talking to each other.
    - `contractive`: dropping what is not chosen shrinks the squared norm (in mean, if random).
    """

    @property
    def shared(self) -> bool: ...
    @property
    def contractive(self) -> bool: ...

    def count(self, numel: int) -> int:
        """How many of `numel` elements are chosen; a function of `numel` alone."""
        ...

    def select(self, x: Tensor, at: Moment) -> Tensor:
        """Indices (count,) int64, ascending and without repeats, on the device of `x` (numel,)."""
        ...


def check_ratio(ratio: float) -> float:
    """Return `ratio` when it lies in (0, 1], else raise."""
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"ratio={ratio} is outside (0, 1]; it is the share of elements kept, e.g. 0.01")
    return ratio


def count_kept(ratio: float, numel: int) -> int:
    """Elements kept of `numel`: rounded, but at least one unless there is none."""
    return min(numel, max(1, round(ratio * numel)))


@dataclass(frozen=True)
class TopK:
    """The largest magnitudes, exactly; among equals the lowest index."""

    ratio: float
    shared: bool = False
    contractive: bool = True

    def count(self, numel: int) -> int:
        """See `Selector.count`."""
        return count_kept(self.ratio, numel)

    def select(self, x: Tensor, at: Moment) -> Tensor:
        """See `Selector.select`."""
        return topk_indices(x, self.count(x.numel()))


@dataclass(frozen=True)
class RandomK:
    """Uniformly random elements from the shared generator, so that no index travels."""

    ratio: float
    shared: bool = True
    contractive: bool = True

    def count(self, numel: int) -> int:
        """See `Selector.count`."""
        return count_kept(self.ratio, numel)

    def select(self, x: Tensor, at: Moment) -> Tensor:
        """See `Selector.select`. Uniform without replacement."""
        seed = int(torch.randint(2**62, (1,), generator=at.shared()))
        return sample_indices(x.numel(), self.count(x.numel()), seed).to(x.device)


@dataclass(frozen=True)
class Everything:
    """All elements: the identity among selectors."""

    shared: bool = True
    contractive: bool = True

    def count(self, numel: int) -> int:
        """See `Selector.count`."""
        return numel

    def select(self, x: Tensor, at: Moment) -> Tensor:
        """See `Selector.select`."""
        return torch.arange(x.numel(), device=x.device)


def top_k(ratio: float) -> TopK:
    """Keep the share `ratio` with the largest magnitudes."""
    return TopK(check_ratio(ratio))


def random_k(ratio: float) -> RandomK:
    """Keep a uniformly random share `ratio`."""
    return RandomK(check_ratio(ratio))


def everything() -> Everything:
    """Keep all elements."""
    return Everything()
