"""Messages from one rank to another: all that an algorithm of hops may use.

Vocabulary: a *hop* is one message; M is the payload of a rank in bytes, N the number of ranks. The
algorithms block: whoever must not, runs them on a thread that may (`gradwire.comm.progress`). Every message
of no elements is left out, by the one who sends and by the one who receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradwire.comm.base import Pending


class Peers(Protocol):
    """The other ranks. Messages between two ranks arrive in the order in which they were sent."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    def send(self, tensor: Tensor, target: int) -> Pending:
        """Send `tensor` (numel,) to rank `target`; it must not be written to before the wait."""

    def receive(self, out: Tensor, source: int) -> Pending:
        """Fill `out` (numel,) with what rank `source` sends."""


def parts_of(tensor: Tensor, world: int) -> Sequence[Tensor]:
    """Views of `world` parts of `tensor`; the first may have one element more than the last.

    >>> import torch
    >>> [part.tolist() for part in parts_of(torch.arange(5), 3)]
    [[0, 1], [2, 3], [4]]
    """
    return tensor.view(-1).tensor_split(world)
