"""The protocol of selectors, and the arithmetic of shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from gradwire.laws import Laws, formerly
from gradwire.unit.context import ExchangeContext

if not TYPE_CHECKING:
    __getattr__ = formerly(__name__, "SelectorLaws")


@runtime_checkable
class Selector(Protocol):
    """Chooses elements of a unit."""

    @property
    def laws(self) -> Laws: ...

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        """Number of elements to choose of `numel`, or the most; equal on all ranks, for any values."""
        ...

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        """Indices (count,) int64, ascending and without repeats, on the device of `x` (numel,)."""
        ...


def check_ratio(ratio: float) -> float:
    """Return `ratio`; raises `ValueError` unless it lies in (0, 1]."""
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"ratio={ratio} is outside (0, 1]; it is the share of elements kept, e.g. 0.01")
    return ratio


def count_kept(ratio: float, numel: int) -> int:
    """Number of elements to keep of `numel`: rounded, but at least one if there are any.

    >>> count_kept(0.01, 1000), count_kept(0.01, 3), count_kept(0.01, 0)
    (10, 1, 0)
    """
    return min(numel, max(1, round(ratio * numel)))


def check_fixed_size(selector: Selector) -> Selector:
    """Return `selector`; raises `ValueError` unless it declares `fixed_size`."""
    if not selector.laws.fixed_size:
        raise ValueError(
            f"{selector} chooses a number of elements that depends on their values, and here all ranks must "
            "know the size beforehand: all-gather it with gradwire.exchange.uneven_gather.agreed, or take a "
            "selector with a ratio"
        )
    return selector
