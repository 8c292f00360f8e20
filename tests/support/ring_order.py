"""In which order a ring adds: what sums in frames that lose nothing are compared with, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ring_sum(addends: Sequence[Tensor]) -> Tensor:
    """Sum (numel,) of each rank's: partition p is (((x_p + x_{p+1}) + x_{p+2}) + …), indices modulo W."""
    world, numel = len(addends), addends[0].numel()
    sums = torch.empty_like(addends[0])
    for partition in range(world):
        here = slice(partition * numel // world, (partition + 1) * numel // world)
        sums[here] = addends[partition][here]
        for hop in range(1, world):
            sums[here] = addends[(partition + hop) % world][here] + sums[here]
    return sums
