"""Times that all ranks have measured, as the same numbers on every rank.

They travel in tensors on the CPU, so the comm is the engine's `control`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.comm.base import Comm


def table_of(comm: Comm, mine: Sequence[float]) -> list[list[float]]:
    """Every rank's numbers, by rank. One all-gather of 8 bytes per number and rank."""
    row = torch.tensor(list(mine), dtype=torch.float64, device="cpu")
    out = torch.empty(comm.world, row.numel(), dtype=torch.float64, device="cpu")
    comm.all_gather(out, row).wait()
    rows: list[list[float]] = out.tolist()
    return rows


def shortest(comm: Comm, durations_s: Sequence[float]) -> list[float]:
    """True durations of collectives from this rank's (end − start), in the order in which they ran.

    All ranks leave a collective together but may enter it apart, and an early rank's wait is no transmission:
    the minimum over ranks is what the wire took (COVAP's distributed profiler, Meng et al. 2023, section
    III-B). No clock needs to be set.
    """
    return [min(column) for column in zip(*table_of(comm, durations_s), strict=True)]


def slowest(comm: Comm, seconds: Sequence[float]) -> list[float]:
    """The longest over ranks of each: what all have to wait for."""
    return [max(column) for column in zip(*table_of(comm, seconds), strict=True)]
