"""A choice that grows stricter with time: ratio warm-up (Lin et al. 2018, "Deep gradient compression")."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gradwire.codec.select.base import Selector, SelectorLaws, check_ratio
from gradwire.moment import Moment


@dataclass(frozen=True)
class Ramp:
    """Selector i is in force from committed step `starts[i]` on; the step is state, so a resumed run goes on.

    Memory knows nothing of ratios: what a looser choice would have sent simply waits.
    """

    starts: tuple[int, ...]
    selectors: tuple[Selector, ...]

    @property
    def laws(self) -> SelectorLaws:
        """What all of them promise."""
        return SelectorLaws(
            shared=all(selector.laws.shared for selector in self.selectors),
            contractive=all(selector.laws.contractive for selector in self.selectors),
            fixed_size=all(selector.laws.fixed_size for selector in self.selectors),
        )

    def now(self, at: Moment) -> Selector:
        """The selector in force."""
        return self.selectors[bisect_right(self.starts, at.step) - 1]

    def count(self, numel: int, at: Moment) -> int:
        """See `Selector.count`."""
        return self.now(at).count(numel, at)

    def select(self, x: Tensor, at: Moment) -> Tensor:
        """See `Selector.select`."""
        return self.now(at).select(x, at)


WARM_UP = (0.25, 0.0625, 0.015625, 0.004)
"""Ratios of the four warm-up epochs of the paper: 75, 93.75, 98.4 and 99.6 % are not sent."""


def ramp(make: Callable[[float], Selector], ratio: float, steps: int) -> Ramp:
    """`make(ratio)` after `steps` steps in which the ratio falls to it in the paper's stages.

    >>> from gradwire.codec.select.topk import top_k
    >>> ramp(top_k, 0.001, steps=400).starts
    (0, 100, 200, 300, 400)
    >>> [choice.ratio for choice in ramp(top_k, 0.01, steps=300).selectors]
    [0.25, 0.0625, 0.015625, 0.01]
    """
    check_ratio(ratio)
    if steps < 0:
        raise ValueError(f"steps={steps} must not be negative; 0 starts with the ratio itself")
    stages = [stage for stage in WARM_UP if stage > ratio] if steps else []
    starts = tuple(steps * index // len(stages) for index in range(len(stages))) if stages else ()
    return Ramp((*starts, steps if stages else 0), tuple(make(stage) for stage in (*stages, ratio)))
