"""Work on large tensors cut into slices, for threads of our own where cores are free.

Kernels release the interpreter lock, so plain threads do. Numba's own (`parallel=True`) do not: its workqueue
layer aborts the process when two threads enter it. Slices change no number: they are used only where elements
do not depend on each other. Their gain depends on the memory: if one core can saturate it, a fold of 25 M
elements takes as long with two (measured: 11.7 and 11.4 ms); a sketch is read in 83 ms, not 151. Top-k
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
"""Elements below which a slice is not worth the hand-over: some 0.2 ms of the fastest kernel."""
MOST = 4
"""Threads beyond which one socket's memory is busy anyway."""


_here = threading.local()


def computes_elsewhere() -> None:
    """From now on, kernels on this thread may use all cores of the rank: a device computes the gradients."""
    _here.elsewhere = True


def free_threads() -> int:
    """How many threads a kernel may use: this rank's share of the cores, less what torch computes with."""
    cores = all_threads()
    if getattr(_here, "elsewhere", False):
        return cores
    return max(1, min(MOST, cores - torch.get_num_threads() + 1))


def all_threads() -> int:
    """As many threads as this rank may use cores: one where nobody says how many ranks share them."""
    return max(1, int(cores_per_rank() or 1))


def threads_for(numel: int, smallest: int | None = None) -> int:
    """The number of threads that share a pass over `numel` elements, of at least `smallest` each."""
    least = SMALLEST if smallest is None else smallest
    return 1 if numel < 2 * least else max(1, min(free_threads(), numel // least))


def each_slice(numel: int, work: Callable[[slice], T]) -> list[T]:
    """`work` of slices that make up 0 … numel, in order; side by side where there are threads for it.

    >>> each_slice(10, lambda here: (here.start, here.stop))
    [(0, 10)]
    """
    number = threads_for(numel)
    bounds = [numel * i // number for i in range(number + 1)]
    return side_by_side([partial(work, slice(a, b)) for a, b in pairwise(bounds)])


def side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all of `works`, in order, each on a thread of its own.

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
