"""The IDX array format of the MNIST family, plain or compressed with gzip or xz."""

import gzip
import lzma
import math
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_UNSIGNED_BYTE = 0x08
_OPENERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}


def read_idx(path: Path) -> Bytes:
    """The array of unsigned bytes in `path`; `ValueError` when its header and its length disagree."""
    raw = path.read_bytes()
    try:
        content = _OPENERS[path.suffix](raw) if path.suffix in _OPENERS else raw
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise ValueError(f"{path} is not an IDX file of unsigned bytes: it starts with {content[:4]!r}")
    start = 4 + 4 * content[3]
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) != start + math.prod(shape):
        raise ValueError(f"{path} announces shape {shape} but holds {len(content) - start} bytes of values")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def write_idx(path: Path, values: Bytes) -> None:
    """Writes `values` as an xz-compressed IDX file; the same values always give the same bytes."""
    header = bytes((0, 0, _UNSIGNED_BYTE, values.ndim)) + np.array(values.shape, dtype=">u4").tobytes()
    path.write_bytes(lzma.compress(header + values.tobytes(), preset=9))
