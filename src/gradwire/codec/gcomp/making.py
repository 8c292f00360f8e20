"""Tables in the making: on a thread of their own, so that no step waits for a code to be built.

What ranks agree on and checkpoints hold is the counts. A table follows from them, so that whoever asks for it
early waits for it, and nobody can get another.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.codec.gcomp.table import Table

LIVE = 256
"""Tables that are kept ready, each with 0.3 MB of look-ups."""


def begin_table(counts: Tensor) -> None:
    """Start to make the table for `counts` (SYMBOLS,) int64."""
    _making(counts.numpy().tobytes())


def table_of(counts: Tensor) -> Table:
    """The best table for `counts` (SYMBOLS,) int64, with what coding looks up; waits if need be.

    >>> counts = torch.zeros(256, dtype=torch.int64)
    >>> counts[100:103] = 5
    >>> begin_table(counts)
    >>> table_of(counts) == Table.from_histogram(counts)
    True
    """
    return _making(counts.numpy().tobytes()).result()


@lru_cache(maxsize=LIVE)
def _making(counts: bytes) -> Future[Table]:
    return _maker().submit(_made, counts)


@lru_cache(maxsize=1)
def _maker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradwire-tables")


def _made(counts: bytes) -> Table:
    table = Table.from_histogram(torch.frombuffer(bytearray(counts), dtype=torch.int64))
    _ = table.lookups.encoding, table.lookups.decoding
    return table
