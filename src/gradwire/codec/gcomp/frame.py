"""A tensor as one frame of bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.codec.gcomp.drops import Dropped, drops_of, words_of
from gradwire.codec.gcomp.header import CHUNK, HEADER_BYTES, ROW_BYTES, Header, Key, chunks_of, largest_frame
from gradwire.codec.gcomp.table import Table
from gradwire.kernels.checksums import checksum
from gradwire.kernels.frames import Drops, encode_chunks
from gradwire.kernels.huffman import SYMBOLS
from gradwire.kernels.slices import each_slice

_HEAD, _ROW = HEADER_BYTES // 8, ROW_BYTES // 8


def frame(
    x: Tensor,
    dropped: Dropped,
    table: Table,
    key: Key,
    *,
    explicit: bool,
    flush: bool,
    buffer: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """x (numel,), float32, bfloat16 or float16, as uint8 bytes.

    `dropped` is what is cut off mantissas (see `gradwire.codec.gcomp.drops`); `flush` makes numbers below the
    normal range +0. The frame is written to `buffer` if there is one, uint8 of `largest_frame(...)` bytes or
    more at an address that 8 divides, and is then a view of it. Never longer than `largest_frame`; always a
    multiple of 8 bytes. To int64 `counts` (SYMBOLS,) is added what `histogram` would count, at half its
    cost. `ValueError` for arguments that are not of this kind.

    >>> from gradwire.codec.gcomp.unframe import unframe
    >>> x, table, key = torch.tensor([1.0, -2.5, 0.0]), Table.prior(), Key(step=0, unit=0, hop=0)
    >>> data, out = frame(x, 0, table, key, explicit=False, flush=False), torch.empty(3)
    >>> unframe(data, out, 0, {table.id: table}, key)
    >>> out
    tensor([ 1.0000, -2.5000,  0.0000])
    """
    drops = drops_of(dropped, x, explicit=explicit, flush=flush)
    words = words_of(x)
    most = largest_frame(x.numel(), x.dtype)
    data = torch.empty(most, dtype=torch.uint8, device="cpu") if buffer is None else buffer
    if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() < most or data.data_ptr() % 8:
        raise ValueError(f"the buffer must be aligned uint8, {most} bytes or more")
    out = data[:most].numpy().view(np.uint64)
    directory = np.zeros((chunks_of(x.numel()), 8), np.uint16)
    place = _HEAD + _encode(words, drops, table, x.element_size(), out[_HEAD:], directory, counts)
    rows = out[place : place + _ROW * directory.shape[0]]
    rows[:] = directory.view(np.uint64).reshape(-1)
    length = 8 * (place + rows.size + 1)
    how = drops.how
    head = Header(
        key, x.dtype, x.numel(), table.id, length, drops.drop if not explicit else 0, flush, explicit,
        how.thresholds,
    )  # fmt: skip
    out[:_HEAD] = np.frombuffer(head.pack(), np.uint64)
    out[length // 8 - 1] = checksum(data[: length - 8])
    return data[:length].to(x.device)


def _encode(
    words: NDArray[np.uint32],
    drops: Drops,
    table: Table,
    itemsize: int,
    out: NDArray[np.uint64],
    directory: NDArray[np.uint16],
    counts: Tensor | None,
) -> int:
    """All chunks, on several threads where they are free; how many words of `out` they take.

    Each thread begins where its chunks would if all before it were raw, so that none meets another; what is
    between them is closed up afterwards.
    """
    per_chunk = CHUNK * itemsize // 8

    def part(here: slice) -> tuple[int, int, NDArray[np.int64]]:
        first, last = chunks_of(here.start), chunks_of(here.stop)
        numbers = slice(first * CHUNK, last * CHUNK)
        found = np.zeros((0 if counts is None else 4, SYMBOLS), np.int64)
        used = encode_chunks(
            words,
            drops,
            numbers,
            table.lookups,
            CHUNK,
            out[first * per_chunk :],
            directory[first:last],
            found,
        )
        return first * per_chunk, used, found

    place = 0
    for start, used, found in each_slice(words.size, part):
        if counts is not None:
            counts += torch.from_numpy(found.sum(0))
        if start != place:
            out[place : place + used] = out[start : start + used].copy()
        place += used
    return place
