"""The norms of a step's gradient and of what earlier steps left unsent, parameter by parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Weighing:
    """Sums of squares of the units of one flat buffer in one step. Nothing is read on the host.

    `weight` is the amount of gradient that a memory of 1 stands for (`Memory.weight`).

    >>> weighing = Weighing(parameters=2, device=torch.device("cpu"))
    >>> x, unsent = torch.tensor([3.0, 5.0, 1.0]), torch.tensor([0.0, 2.0, 2.0])
    >>> weighing.add(x, unsent, coefficient=0.5, first=0, sizes=(2, 1))
    >>> weighing.norms()
    tensor([[5., 0.],
            [2., 2.]], dtype=torch.float64)
    """

    def __init__(self, parameters: int, device: torch.device, weight: float = 1.0) -> None:
        self._weight = weight
        self._squares = torch.zeros(2, parameters, dtype=torch.float64, device=device)

    def add(
        self, x: Tensor, unsent: Tensor | None, *, coefficient: float, first: int, sizes: Sequence[int]
    ) -> None:
        """Add a unit, before its exchange.

        Args:
            x: memory plus gradient (numel,), the input of the exchange.
            unsent: the memory (numel,), of any floating type; `None` without a memory.
            coefficient: the factor by which the memory was added.
            first: the number of the unit's first parameter in the flat buffer.
            sizes: elements of each parameter in the unit, in order.
        """
        here = self._squares[:, first : first + len(sizes)]
        if unsent is None:
            here[0] += _squares(x, sizes)
            return
        old = unsent.to(x.dtype)
        here[0] += _squares(torch.sub(x, old, alpha=coefficient), sizes)
        here[1] += _squares(old, sizes)

    def norms(self) -> Tensor:
        """Norms (2, parameters) float64, on the gradients' device: of the step's addition, and of the unsent
        part.
        """
        norms = self._squares.sqrt()
        norms[1] *= self._weight
        return norms


def _squares(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Squared norms of neighbouring slices, in one call: there may be hundreds."""
    return torch.stack(torch._foreach_norm(values.split_with_sizes(sizes))).double().square()
