"""Bytes from a peer as a tensor, if they are what they claim to be."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.codec.gcomp.drops import Dropped, drops_of, tensor_of
from gradwire.codec.gcomp.header import (
    CHECKSUM_BYTES,
    CHUNK,
    HEADER_BYTES,
    ROW_BYTES,
    Header,
    Key,
    chunks_of,
    largest_frame,
)
from gradwire.codec.gcomp.table import Table
from gradwire.errors import WireError
from gradwire.kernels.checksums import checksum
from gradwire.kernels.frames import Drops, decode_chunks
from gradwire.kernels.slices import each_slice

_SIZES, _FIELDS, _KIND = 7, 6, 7


def unframe(
    data: Tensor,
    out: Tensor,
    dropped: Dropped | None,
    tables: Mapping[int, Table],
    key: Key,
    *,
    add: bool = False,
    limit: int | None = None,
) -> None:
    """Decode the frame `data` (bytes,) uint8 into out (numel,), or with `add` add it to `out`.

    `dropped` is what the sender gave, None where the levels travel; `tables` are those that the frame may
    name, by their `id`; `key` is what it must belong to. `WireError` for everything else: bytes that are no
    frame, damaged ones, a frame of another unit, type, table or version, or longer than `limit` bytes
    (`largest_frame` if not given). After an error `out` may hold anything. Nothing that the bytes say makes
    it take more memory than `out` has, twice that for 16-bit types, and two bytes for each element of a
    chunk. On addresses that 8 does not divide, the frame is copied first.

    Example: see `frame`.
    """
    if out.dim() != 1:
        raise ValueError(f"a frame is decoded into a flat tensor, not {tuple(out.shape)}")
    most = largest_frame(out.numel(), out.dtype)
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise WireError(f"a frame is flat uint8, not {data.dtype} {tuple(data.shape)}")
    if data.numel() > min(most, most if limit is None else limit):
        raise WireError(f"a frame of {out.numel()} elements has no {data.numel()} bytes")
    data = data.cpu().contiguous()
    head = Header.unpack(data[:HEADER_BYTES].numpy().tobytes())
    _check_claims(head, out, data.numel(), key)
    data = data.clone() if data.data_ptr() % 8 else data
    words = data.numpy().view(np.uint64)
    if int(words[-1]) != checksum(data[:-CHECKSUM_BYTES]):
        raise WireError("a frame's checksum is wrong: its bytes were damaged on the way")
    if head.table not in tables:
        raise WireError(f"the frame was coded with table {head.table:#010x}, which is not among those agreed")
    drops = _drops(head, dropped, out)
    directory = _directory(words, head)
    _decode(words, directory, drops, tables[head.table], out, add)


def _check_claims(head: Header, out: Tensor, length: int, key: Key) -> None:
    if head.length != length or length % 8:
        raise WireError(f"a frame of {head.length} bytes arrived as {length}")
    if head.key != key:
        raise WireError(f"the frame belongs to {head.key}; expected was {key}")
    found, expected = (head.numel, head.dtype), (out.numel(), out.dtype)
    if found != expected:
        raise WireError(f"the frame holds {found} elements of a type; expected were {expected}")


def _drops(head: Header, dropped: Dropped | None, out: Tensor) -> Drops:
    """What the sender dropped, if frame and receiver agree."""
    thresholds = isinstance(dropped, Tensor)
    if head.explicit != (dropped is None) or head.thresholds != thresholds:
        raise WireError("the frame says otherwise how many bits were dropped than the receiver expects")
    expected = dropped if isinstance(dropped, int) else 0
    if head.drop != expected:
        raise WireError(f"the frame has {head.drop} bits of each value dropped; expected were {expected}")
    try:
        return drops_of(0 if dropped is None else dropped, out, explicit=head.explicit, flush=head.flush)
    except ValueError as error:
        raise WireError(f"the frame cannot be of this kind: {error}") from error


def _directory(words: NDArray[np.uint64], head: Header) -> NDArray[np.uint16]:
    """The sizes of all segments (chunks, 8), checked to fill the frame exactly."""
    chunks = chunks_of(head.numel)
    start = words.size - 1 - chunks * ROW_BYTES // 8
    if start < HEADER_BYTES // 8:
        raise WireError(f"a frame of {words.size * 8} bytes has no room for {chunks} chunks")
    rows = words[start:-1].view(np.uint16).reshape(chunks, 8)
    counts = np.full(chunks, CHUNK, np.int64)
    counts[chunks - 1 :] = head.numel - (chunks - 1) * CHUNK
    raw = -(-counts * head.dtype.itemsize // 8)
    sizes, stored = rows[:, :_SIZES].astype(np.int64), rows[:, _KIND] == 1
    good = (rows[:, _KIND] <= 1) & (~stored | ((sizes[:, _FIELDS] == raw) & (sizes[:, :_FIELDS] == 0).all(1)))
    if not good.all() or int(sizes.sum()) != start - HEADER_BYTES // 8:
        raise WireError("a frame's directory does not add up")
    return rows


def _decode(
    words: NDArray[np.uint64],
    directory: NDArray[np.uint16],
    drops: Drops,
    table: Table,
    out: Tensor,
    add: bool,
) -> None:
    """All chunks, on several threads where they are free."""
    direct = out.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous()
    floats = out.detach().numpy() if direct else np.empty(out.numel(), np.float32)
    bits = floats.view(np.uint32)
    starts = HEADER_BYTES // 8 + np.cumsum(directory[:, :_SIZES].astype(np.int64).sum(1))

    def part(here: slice) -> int:
        first, last = chunks_of(here.start), chunks_of(here.stop)
        place = starts[first - 1] if first else HEADER_BYTES // 8
        numbers = slice(first * CHUNK, last * CHUNK)
        rows = directory[first:last]
        wrong = decode_chunks(
            words, int(place), rows, CHUNK, drops, numbers, table.lookups, bits, add and direct
        )
        return -1 if wrong < 0 else first + wrong

    for wrong in each_slice(out.numel(), part):
        if wrong >= 0:
            raise WireError(f"chunk {wrong} of a frame does not decode")
    if not direct:
        found = tensor_of(bits, out.dtype).to(out.device)
        _ = out.add_(found) if add else out.copy_(found)
