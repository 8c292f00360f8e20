"""XXH64 of Collet's xxHash: a 64-bit checksum, computed from 8 bytes at a time at memory speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared

_U = np.uint64
_P1, _P2, _P3, _P4, _P5 = (
    _U(0x9E3779B185EBCA87), _U(0xC2B2AE3D27D4EB4F), _U(0x165667B19E3779F9),
    _U(0x85EBCA77C2B2AE63), _U(0x27D4EB2F165667C5),
)  # fmt: skip


@kernel
def _turned(x: Any, bits: Any) -> Any:
    return (x << _U(bits)) | (x >> _U(64 - bits))


@kernel
def _round(lane: Any, word: Any) -> Any:
    return _turned(lane + word * _P2, 31) * _P1


@kernel
def _merged(state: Any, lane: Any) -> Any:
    return (state ^ _round(_U(0), lane)) * _P1 + _P4


@prepared("uint64[::1], uint8[::1]", subject="frames")
@kernel
def checksum(words: Any, tail: Any) -> Any:
    """XXH64, seed 0, of uint64 `words` followed by fewer than 8 bytes of uint8 `tail`."""
    lanes = words.size // 4 * 4
    if lanes:
        a, b, c, d = _P1 + _P2, _P2, _U(0), _U(0) - _P1
        for i in range(0, lanes, 4):
            a, b = _round(a, words[i]), _round(b, words[i + 1])
            c, d = _round(c, words[i + 2]), _round(d, words[i + 3])
        state = _turned(a, 1) + _turned(b, 7) + _turned(c, 12) + _turned(d, 18)
        state = _merged(_merged(_merged(_merged(state, a), b), c), d)
    else:
        state = _P5
    state += _U(8 * words.size + tail.size)
    for i in range(lanes, words.size):
        state = _turned(state ^ _round(_U(0), words[i]), 27) * _P1 + _P4
    start = 0
    if tail.size >= 4:
        four = _U(tail[0]) | _U(tail[1]) << _U(8) | _U(tail[2]) << _U(16) | _U(tail[3]) << _U(24)
        state, start = _turned(state ^ four * _P1, 23) * _P2 + _P3, 4
    for i in range(start, tail.size):
        state = _turned(state ^ _U(tail[i]) * _P5, 11) * _P1
    state = (state ^ (state >> _U(33))) * _P2
    state = (state ^ (state >> _U(29))) * _P3
    return state ^ (state >> _U(32))
