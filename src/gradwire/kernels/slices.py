"""Work on large tensors cut into slices, for threads of our own where cores are free.

Kernels release the interpreter lock, so plain threads do. Numba's own (`parallel=True`) do not: its workqueue
layer aborts the process when two threads enter it. Slices change no number: they are used only where elements
do not depend on each other. Their gain depends on the memory: if one core can saturate it, a compensation of
25 M elements takes as long with two (measured: 11.7 and 11.4 ms); a sketch is read in 83 ms, not 151. Top-k
is not sliced: its one pass runs at the speed of memory, and a common choice after slices was slower.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import TypeVar

import torch

from gradwire.environment import cores_per_rank

T = TypeVar("T")

SMALLEST = 1 << 20
"""Fewest elements of a slice. Less work, some 0.2 ms of the fastest kernel, does not repay the hand-over to a
thread."""
MOST = 4
"""Most threads per kernel. More do not help, because they saturate the memory of one socket."""


_here = threading.local()


def computes_elsewhere() -> None:
    """Let kernels on this thread use all cores of the rank from now on, because a device computes the
    gradients.
    """
    _here.elsewhere = True


def free_threads() -> int:
    """Threads that a kernel may use: this rank's share of the cores, less those of torch; 1 to `MOST`.

    After `computes_elsewhere`, the whole share.
    """
    cores = all_threads()
    if getattr(_here, "elsewhere", False):
        return cores
    return max(1, min(MOST, cores - torch.get_num_threads() + 1))


def all_threads() -> int:
    """Number of cores that this rank may use; 1 if the number of ranks on this machine is unknown."""
    return max(1, int(cores_per_rank() or 1))


def threads_for(numel: int, smallest: int | None = None) -> int:
    """Number of threads for a pass over `numel` elements, with at least `smallest` elements each."""
    least = SMALLEST if smallest is None else smallest
    return 1 if numel < 2 * least else max(1, min(free_threads(), numel // least))


def each_slice(numel: int, work: Callable[[slice], T]) -> list[T]:
    """Run `work` on slices of 0 … numel, on several threads if cores are free; returns the results in order.

    >>> each_slice(10, lambda here: (here.start, here.stop))
    [(0, 10)]
    """
    number = threads_for(numel)
    bounds = [numel * i // number for i in range(number + 1)]
    return side_by_side([partial(work, slice(a, b)) for a, b in pairwise(bounds)])


def side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run all `works` at the same time, each on its own thread, the first on the caller's; returns the
    results in order.

    >>> side_by_side([lambda: 1])
    [1]
    """
    first, *others = works
    pending = [_pool().submit(work) for work in others]
    # The caller's own thread takes one too, and waits for the others even if its own fails.
    try:
        done = [first()]
    finally:
        waited = [future.exception() for future in pending]
    for error in filter(None, waited):
        raise error
    return done + [future.result() for future in pending]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(MOST, os.cpu_count() or 1) - 1, thread_name_prefix="gradwire-kernel")


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork, their pool would.
    os.register_at_fork(after_in_child=_pool.cache_clear)
