"""Work on large tensors cut into slices, for threads of our own where cores are free.

Kernels release the interpreter lock, so plain threads do. Numba's own (`parallel=True`) do not: its workqueue
layer aborts the process when two threads enter it. Slices change no number: they are used only where elements
do not depend on each other. Their gain depends on the memory: if one core can saturate it, a fold of 25 M
elements takes as long with two (measured: 11.7 and 11.4 ms); a sketch is read in 83 ms, not 151. Top-k
is not sliced: its one pass runs at the speed of memory, and a common choice after slices was slower.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch

from gradwire.environment import cores_per_rank

T = TypeVar("T")

SMALLEST = 1 << 20
"""Elements below which a slice is not worth the hand-over: some 0.2 ms of the fastest kernel."""
MOST = 4
"""Threads beyond which one socket's memory is busy anyway."""


def free_threads() -> int:
    """How many threads a kernel may use: this rank's share of the cores, less what torch computes with.

    Where that share is unknown, one thread is used.
    """
    cores = cores_per_rank()
    return 1 if cores is None else max(1, min(MOST, int(cores) - torch.get_num_threads() + 1))


def threads_for(numel: int) -> int:
    """The number of threads that share a pass over `numel` elements."""
    return 1 if numel < 2 * SMALLEST else max(1, min(free_threads(), numel // SMALLEST))


def each_slice(numel: int, work: Callable[[slice], T]) -> list[T]:
    """`work` of slices that make up 0 … numel, in order; side by side where there are threads for it.

    >>> each_slice(10, lambda here: (here.start, here.stop))
    [(0, 10)]
    """
    number = threads_for(numel)
    if number == 1:
        return [work(slice(0, numel))]
    bounds = [numel * i // number for i in range(number + 1)]
    first, *others = (slice(a, b) for a, b in pairwise(bounds))
    pending = [_pool().submit(work, here) for here in others]
    # The caller's own thread takes a slice too, and waits for the others even if its own fails.
    try:
        done = [work(first)]
    finally:
        waited = [future.exception() for future in pending]
    for error in filter(None, waited):
        raise error
    return done + [future.result() for future in pending]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST - 1, thread_name_prefix="gradwire-kernel")


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork, their pool would.
    os.register_at_fork(after_in_child=_pool.cache_clear)
