"""A selector for tests: all elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.select.base import SelectorLaws
from gradwire.moment import Moment


@dataclass(frozen=True)
class Everything:
    """All elements."""

    laws = SelectorLaws(shared=True, contractive=True, fixed_size=True, stays_on_device=True)

    def count(self, numel: int, at: Moment) -> int:
        return numel

    def select(self, x: Tensor, at: Moment) -> Tensor:
        return torch.arange(x.numel(), device=x.device)


def everything() -> Everything:
    """Keep all elements."""
    return Everything()
