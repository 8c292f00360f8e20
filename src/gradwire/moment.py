"""Where and when an exchange runs, and the random numbers that follow from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moment:
    """What an exchange may use beside the tensor: where and when it runs.

    `step` counts committed steps; `unit` is the unit's number within its lane, `lane` the lane's number.
    `pieces` are the sizes of the parameters' parts that make up the unit, in order; none means one.
    `unsent` (numel,) is what the last committed step left of the unit on this rank, to be read only.
    """

    step: int
    unit: int
    rank: int
    world: int
    seed: int = 0
    lane: int = 0
    pieces: tuple[int, ...] = ()
    unsent: Tensor | None = field(default=None, compare=False, repr=False)

    def shared(self) -> torch.Generator:
        """A CPU generator that is in the same state on all ranks, and never the global one."""
        return self._generator(-1)

    def private(self) -> torch.Generator:
        """A CPU generator of this rank alone."""
        return self._generator(self.rank)

    def _generator(self, who: int) -> torch.Generator:
        key = f"{self.seed}/{self.step}/{self.lane}/{self.unit}/{who}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
