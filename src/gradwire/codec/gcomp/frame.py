"""Frames: a tensor as checked bytes for a peer, and the tensor from such bytes.

`docs/engineering/wire-format.md` describes the layout. The first 48 bytes say what a frame is, and to which
step and unit it belongs.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.codec.gcomp.rounding import Dropped, drops_of, tensor_of, words_of
from gradwire.codec.gcomp.table import CodeTable
from gradwire.errors import WireError
from gradwire.kernels.frames import Drops, checksum, decode_chunks, encode_chunks
from gradwire.kernels.huffman import SYMBOLS
from gradwire.kernels.slices import each_slice

MAGIC = b"GWgc"
VERSION = 1
_LAYOUT = struct.Struct("<4sBBBBQIIIIQQ")
HEADER_BYTES = _LAYOUT.size
ROW_BYTES = 16
CHECKSUM_BYTES = 8
CHUNK = 1 << 16
"""Elements of a chunk. The directory, and half a word lost in each segment, add 0.2 % to its symbols."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLUSH, _EXPLICIT, _THRESHOLDS = 1, 2, 4


@dataclass(frozen=True)
class Key:
    """Identity of a frame: a receiver refuses a frame with another key than it expects.

    `hop` counts the messages of one exchange. `state` is a fingerprint of everything that sender and receiver
    must share to understand the frame, such as thresholds; 0 if there is nothing. `step` has 64 bits, the
    others have 32.

    >>> Key(step=3, unit=0, hop=1)
    Key(step=3, unit=0, hop=1, state=0)
    """

    step: int
    unit: int
    hop: int
    state: int = 0

    def __post_init__(self) -> None:
        for name, bits in (("step", 64), ("unit", 32), ("hop", 32), ("state", 32)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name}={value} does not fit into {bits} bits without a sign")


class Header(NamedTuple):
    """The fields of a frame's header."""

    key: Key
    dtype: torch.dtype
    numel: int
    table: int
    length: int
    drop: int = 0
    flush: bool = False
    explicit: bool = False
    thresholds: bool = False

    def pack(self) -> bytes:
        flags = _FLUSH * self.flush | _EXPLICIT * self.explicit | _THRESHOLDS * self.thresholds
        key = self.key
        return _LAYOUT.pack(
            MAGIC, VERSION, DTYPES.index(self.dtype), flags, self.drop,
            key.step, key.unit, key.hop, key.state, self.table, self.numel, self.length,
        )  # fmt: skip

    @staticmethod
    def unpack(data: bytes) -> Header:
        """Read the header at the beginning of `data`; raises `WireError` if it is none of this version."""
        if len(data) < HEADER_BYTES:
            raise WireError(f"{len(data)} bytes are less than a frame's header has")
        magic, version, dtype, flags, drop, step, unit, hop, state, table, numel, length = (
            _LAYOUT.unpack_from(data)
        )
        if magic != MAGIC:
            raise WireError(f"a frame begins with {MAGIC!r}, not {magic!r}")
        if version != VERSION:
            raise WireError(f"the frame is of version {version}; this gradwire reads version {VERSION}")
        if dtype >= len(DTYPES) or flags >= 2 * _THRESHOLDS:
            raise WireError(f"a frame has no type {dtype} or no flags {flags:#x}")
        key = Key(step, unit, hop, state)
        modes = bool(flags & _FLUSH), bool(flags & _EXPLICIT), bool(flags & _THRESHOLDS)
        return Header(key, DTYPES[dtype], numel, table, length, drop, *modes)


def chunks_of(numel: int) -> int:
    """Number of chunks that hold `numel` elements.

    >>> chunks_of(0), chunks_of(1), chunks_of(65536), chunks_of(65537)
    (0, 1, 1, 2)
    """
    return -(-numel // CHUNK)


def largest_frame(numel: int, dtype: torch.dtype) -> int:
    """Largest size in bytes of a frame of `numel` elements: all of them stored raw.

    >>> largest_frame(1_000_000, torch.float32)
    4000312
    """
    whole, rest = divmod(numel, CHUNK)
    raw = whole * CHUNK * dtype.itemsize + -(-rest * dtype.itemsize // 8) * 8
    return HEADER_BYTES + raw + ROW_BYTES * chunks_of(numel) + CHECKSUM_BYTES


_HEAD, _ROW = HEADER_BYTES // 8, ROW_BYTES // 8


def frame(
    x: Tensor,
    dropped: Dropped,
    table: CodeTable,
    key: Key,
    *,
    explicit: bool,
    flush: bool,
    buffer: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Encode x as one frame. Returns it as uint8 bytes.

    The number of bytes is a multiple of 8, and at most `largest_frame`.

    Args:
        x: (numel,), float32, bfloat16 or float16.
        dropped: how many bits of each mantissa are dropped (`gradwire.codec.gcomp.rounding`).
        table: Huffman table of the symbols; the receiver must have it.
        key: identifies the frame; the receiver checks it.
        explicit: `dropped` is in the frame, so the receiver need not know it.
        flush: replace numbers below the normal range by +0.
        buffer: memory for the frame: uint8, at least `largest_frame` bytes, at an address that is a multiple
            of 8. The result is a view of it.
        counts: int64 (SYMBOLS,); the counts of `histogram` are added to it, at half the cost of `histogram`.

    Raises `ValueError` for other types or sizes.
    >>> x, table, key = torch.tensor([1.0, -2.5, 0.0]), CodeTable.prior(), Key(step=0, unit=0, hop=0)
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
    table: CodeTable,
    itemsize: int,
    out: NDArray[np.uint64],
    directory: NDArray[np.uint16],
    counts: Tensor | None,
) -> int:
    """Encode all chunks, on several threads if cores are free.

    Each thread begins at the place that its chunks would have if all earlier ones were stored raw, so no
    thread writes where another does. The gaps are closed afterwards.

    Args:
        words: (numel,), bits of the floats.
        drops: dropped bits of every float.
        table: the Huffman table.
        itemsize: bytes per element.
        out: written: the chunks.
        directory: (chunks, 8), written: sizes of the segments of each chunk.
        counts: int64 (SYMBOLS,), to which counts of symbols are added, or None.

    Returns the number of words of `out` that the chunks take.
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


_SIZES, _FIELDS, _KIND = 7, 6, 7


def unframe(
    data: Tensor,
    out: Tensor,
    dropped: Dropped | None,
    tables: Mapping[int, CodeTable],
    key: Key,
    *,
    add: bool = False,
    limit: int | None = None,
) -> None:
    """Decode a frame into `out`, or add it to `out`.

    Args:
        data: uint8 (bytes,), the frame. It is copied first if its address is no multiple of 8.
        out: (numel,), written. After an error it may hold anything.
        dropped: as the sender gave it; `None` if the frame has the levels.
        tables: Huffman tables that the frame may name, by `id`.
        key: identity that the frame must have.
        add: True to add instead of overwriting.
        limit: most bytes of the frame; by default `largest_frame`.

    Raises `WireError` for bytes that are no frame, are damaged, or are a frame of another key, type, table or
    version, or longer than the limit. Whatever the bytes say, it allocates no more memory than `out` has,
    twice that for 16-bit types, and two bytes for each element of a chunk.
    """
    if out.dim() != 1:
        raise ValueError(f"a frame is decoded into a flat tensor, not {tuple(out.shape)}")
    most = largest_frame(out.numel(), out.dtype)
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise WireError(f"a frame is flat uint8, not {data.dtype} {tuple(data.shape)}")
    if data.numel() > min(most, most if limit is None else limit):
        raise WireError(f"a frame of {out.numel()} elements cannot have {data.numel()} bytes")
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
    """Dropped bits of each element of `out`, from the header and from the receiver's own `dropped`, which is
    `None` if levels travel. Raises `WireError` if the two disagree.
    """
    thresholds = isinstance(dropped, Tensor)
    if head.explicit != (dropped is None) or head.thresholds != thresholds:
        raise WireError("the frame and the receiver disagree on how many bits were dropped")
    expected = dropped if isinstance(dropped, int) else 0
    if head.drop != expected:
        raise WireError(f"the frame has {head.drop} bits of each value dropped; expected were {expected}")
    try:
        return drops_of(0 if dropped is None else dropped, out, explicit=head.explicit, flush=head.flush)
    except ValueError as error:
        raise WireError(f"the frame cannot be of this kind: {error}") from error


def _directory(words: NDArray[np.uint64], head: Header) -> NDArray[np.uint16]:
    """Sizes of all segments (chunks, 8); raises `WireError` unless they fill the frame exactly."""
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
    table: CodeTable,
    out: Tensor,
    add: bool,
) -> None:
    """Decode all chunks, on several threads if cores are free.

    Args:
        words: the frame; three more words after its end must be readable.
        directory: uint16 (chunks, 8), sizes of the segments.
        drops: dropped bits of each element.
        table: the Huffman code.
        out: (numel,), written.
        add: whether values are added to `out`.

    Raises `WireError` if a chunk is damaged.
    """
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
