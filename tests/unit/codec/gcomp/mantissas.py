"""The last segment of a chunk alone: signs and kept bits of mantissas, field after field, and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.gcomp.rounding import Dropped, drops_of, rounded, tensor_of, words_of
from gradwire.kernels.cpu import mantissa


def exponents_of(x: Tensor, dropped: Dropped = 0, *, explicit: bool = False, flush: bool = False) -> Tensor:
    """The biased exponent of each element of x (numel,) after rounding: uint8 (numel,).

    What a symbol says, and beyond it which exponent an escape stands for.

    >>> exponents_of(torch.tensor([0.0, 1.0, -3.0, 1e-40, float("inf")]))
    tensor([  0, 127, 128,   0, 255], dtype=torch.uint8)
    """
    words = words_of(rounded(x, dropped, flush, explicit=explicit))
    return torch.from_numpy((words >> np.uint32(23) & np.uint32(255)).astype(np.uint8))


def pack_mantissas(x: Tensor, dropped: Dropped = 0, *, explicit: bool = False, flush: bool = False) -> Tensor:
    """Of each element of x (numel,) after rounding the kept mantissa and the sign, as int64 words.

    Nothing of an element whose symbol is 0. The arguments are those of `frame`, and so is the `ValueError`.

    >>> pack_mantissas(torch.tensor([1.0, 0.0, -1.5]), 20)  # 0b0000, nothing, 0b1100
    tensor([192])
    """
    drops, words = drops_of(dropped, x, explicit=explicit, flush=flush), words_of(x)
    even = words.size + words.size % 2
    symbols, widths, fields = (
        np.empty(words.size, np.uint8),
        np.zeros(even, np.uint8),
        np.zeros(even, np.uint32),
    )
    mantissa.split(
        words, drops.of_all(words.size), tuple(drops.how), symbols, widths[: words.size], fields[: words.size]
    )
    out = np.zeros(8 * (words.size * 24 // 64 + 3), np.uint8)  # the kernel writes whole words
    none = np.uint64(0)
    place, held, filled = mantissa.pack_fields(fields, widths, out, none, none, none)
    out[place : place + 8] = np.frombuffer(int(held).to_bytes(8, "little"), np.uint8)
    used = -(-(8 * int(place) + int(filled)) // 64)
    return torch.from_numpy(out[: 8 * used].view(np.int64).copy())


def unpack_mantissas(
    words: Tensor,
    symbols: Tensor,
    exponents: Tensor,
    dropped: Dropped = 0,
    *,
    explicit: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """The numbers (numel,) of `pack_mantissas`, of which `symbols` and `exponents` (numel,) uint8 are known.

    None where the words are no such fields: too few or too many, or a value that its step would have made
    zero. `dropped` and `explicit` are those of the sender.

    >>> from gradwire.codec.gcomp import symbols_of
    >>> x = torch.tensor([1.0, 0.0, -1.5])
    >>> unpack_mantissas(pack_mantissas(x, 20), symbols_of(x, 20), exponents_of(x, 20), 20)
    tensor([ 1.0000,  0.0000, -1.5000])
    """
    like = torch.empty(symbols.numel(), dtype=dtype)
    drops = drops_of(dropped, like, explicit=explicit, flush=False)
    numel, how = symbols.numel(), tuple(drops.how)
    even = numel + numel % 2
    widths, fields = np.zeros(even, np.uint8), np.zeros(even, np.uint32)
    bits = int(
        mantissa.widths_of(exponents.numpy(), symbols.numpy(), drops.of_all(numel), how, widths[:numel])
    )
    if bits < 0 or words.numel() != -(-bits // 64):
        return None
    data = np.zeros(8 * words.numel() + 8, np.uint8)  # the kernel reads a word too much
    data[:-8] = words.numpy().view(np.uint8)
    if bits % 64 and int(words[-1]) % 2**64 >> bits % 64:
        return None
    mantissa.unpack_fields(data, np.uint64(0), widths, fields)
    out = np.empty(numel, np.uint32)
    mantissa.join(exponents.numpy(), widths[:numel], fields[:numel], out)
    return tensor_of(out, dtype)
