"""Cores of its own for every rank, as on a machine of its own.

Ranks that wander over shared cores slow each other down: on a virtual machine a step of plain DDP took up to
a third longer, on an unshaped link.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def share(rank: int, workers: int, cores: Sequence[int]) -> set[int]:
    """Every rank gets as many of `cores`, neighbours; all of them if there are fewer than ranks.

    >>> share(1, 2, [0, 1, 2, 3, 4]), share(1, 2, [3])
    ({2, 3}, {3})
    """
    each = len(cores) // workers
    return set(cores[rank * each : (rank + 1) * each] if each else cores)


def sharing(workers: int) -> int:
    """How many ranks the cores of one rank have to serve, when this process starts `workers` of them."""
    if not hasattr(os, "sched_getaffinity"):
        return workers
    return 1 if len(os.sched_getaffinity(0)) >= workers else workers


def cores_of(rank: int, workers: int) -> set[int]:
    """Those of this process that belong to the rank; empty where unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    return share(rank, workers, sorted(os.sched_getaffinity(0)))


@contextmanager
def on_cores_of(rank: int, workers: int) -> Iterator[None]:
    """Processes that this thread starts inside the block run on the rank's cores; no-op where unknown."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores_of(rank, workers))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
