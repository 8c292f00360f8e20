"""Tables in the making: on a thread of their own, so that no step waits for a code to be built.

What ranks agree on and checkpoints hold is the counts. A table follows from them, so that a caller that asks
early waits for it, and none can get another. It lives as long as the tensor of its counts.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.codec.gcomp.table import Table

_LOCK = Lock()
_MAKING: MutableMapping[Tensor, Future[Table]] = WeakTensorKeyDictionary()


def begin_table(counts: Tensor) -> Future[Table]:
    """Start to make the table for `counts` (SYMBOLS,) int64, which must not be changed any more."""
    with _LOCK:
        future = _MAKING.get(counts)
        if future is None or (future.done() and future.exception() is not None):
            future = _MAKING[counts] = _maker().submit(_made, counts.numpy().tobytes())
        return future


def table_of(counts: Tensor) -> Table:
    """The best table for `counts` (SYMBOLS,) int64, with what coding looks up; waits if need be.

    >>> counts = torch.zeros(256, dtype=torch.int64)
    >>> counts[100:103] = 5
    >>> _ = begin_table(counts)
    >>> table_of(counts) == Table.from_histogram(counts)
    True
    """
    return begin_table(counts).result()


@lru_cache(maxsize=1)
def _maker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradwire-tables")


def _made(counts: bytes) -> Table:
    table = Table.from_histogram(torch.frombuffer(bytearray(counts), dtype=torch.int64))
    _ = table.lookups.encoding, table.lookups.decoding
    return table


def _start_over() -> None:
    """A forked child has the futures, but not the thread."""
    global _LOCK, _MAKING
    _LOCK, _MAKING = Lock(), WeakTensorKeyDictionary()
    _maker.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)
