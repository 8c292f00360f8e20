"""The bits that are dropped of each mantissa, in the form that kernels take.

`dropped` says one of three things.

- An int d, 0 … 23: d bits of every value.
- A tensor (numel,) of uint8 and `explicit`: as many bits of each, 0, 6, 12 or 18; this travels.
- A tensor (numel,) of uint8 and not `explicit`: a *threshold* t. A value is rounded to a multiple of the ulp
  of a number of its own type whose biased exponent is t, 2^(t − 150) in float32: one with exponent e loses
  t − e bits, and what is below half a step becomes zero. 0 drops nothing. It does not travel: the receiver
  must have it.

Bits count from the lowest that a type has: of 16-bit types at most 7 or 10 can be dropped. Rounding is to the
nearest, ties to even. The two largest exponents (Inf, NaN with its payload) are always exact, and so is what
lies below the normal range, unless it is flushed to +0. In float16 it never is: that begins at 2^-14.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels import frames
from gradwire.kernels.frames import Drops, How
from gradwire.kernels.huffman import count_symbols

Dropped = Tensor | int
MANTISSA = 23
LEVELS = (0, 6, 12, 18)
BASES = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Number of lowest mantissa bits of float32 that each type lacks."""


def drops_of(dropped: Dropped, like: Tensor, *, explicit: bool, flush: bool) -> Drops:
    """Convert `dropped`, for elements of the type and number of `like`, to the form that kernels take.

    Args:
        dropped: bits to drop of every mantissa, or uint8 (numel,) with a value for each element: thresholds
            as exponents or, if `explicit`, dropped bits.
        like: float32, bfloat16 or float16, of `numel` elements.
        explicit: whether each element's level travels with it.
        flush: whether numbers below the normal range become zero.

    Raises `ValueError` if `dropped` or `flush` does not fit the type, or `dropped` the number of elements.
    """
    if like.dtype not in BASES:
        raise ValueError(f"{like.dtype} has no GComp code; float32, bfloat16 and float16 do")
    if flush and not may_flush(like.dtype):
        raise ValueError(f"{like.dtype} keeps numbers below its normal range: pass flush=False")
    base, bits = np.uint32(BASES[like.dtype]), mantissa_bits(like.dtype)
    legal = levels_of(like.dtype) if explicit else range(bits + 1)
    if isinstance(dropped, Tensor):
        how = How(not explicit, flush, explicit, base)
        return Drops(_each(dropped, like.numel(), legal if explicit else None), 0, how)
    if dropped not in legal:
        choice = ", ".join(map(str, legal)) + " where levels travel" if explicit else f"0 … {bits}"
        raise ValueError(f"dropped={dropped} bits of {bits} are not possible; choose {choice}")
    each = np.full(like.numel() if explicit else 0, dropped, np.uint8)
    return Drops(each, int(dropped), How(False, flush, explicit, base))


def mantissa_bits(dtype: torch.dtype) -> int:
    """Bits of the mantissa of `dtype`, which is the most that can be dropped.

    >>> [mantissa_bits(dtype) for dtype in BASES]
    [23, 7, 10]
    """
    return MANTISSA - BASES[dtype]


def levels_of(dtype: torch.dtype) -> tuple[int, ...]:
    """Levels (numbers of dropped bits) that the mantissa of `dtype` has room for.

    >>> levels_of(torch.float32), levels_of(torch.float16)
    ((0, 6, 12, 18), (0, 6))
    """
    return tuple(level for level in LEVELS if level <= mantissa_bits(dtype))


def may_flush(dtype: torch.dtype) -> bool:
    """True if numbers below the normal range of `dtype` may become zero: not in float16, whose range begins
    at 2^-14.
    """
    return dtype != torch.float16


def _each(dropped: Tensor, numel: int, levels: Sequence[int] | None) -> NDArray[np.uint8]:
    if dropped.shape != (numel,) or dropped.dtype != torch.uint8:
        raise ValueError(f"dropped is uint8 ({numel},), not {dropped.dtype} {tuple(dropped.shape)}")
    each = dropped.cpu().contiguous().numpy()
    if levels is not None and not np.isin(each, levels).all():
        raise ValueError(f"levels that travel are {', '.join(map(str, levels))} bits")
    return each


def words_of(x: Tensor) -> NDArray[np.uint32]:
    """Bits of x as uint32 (numel,); those of 16-bit floats are spread over float32's fields.

    Raises `ValueError` unless x has one dimension.
    """
    if x.dim() != 1:
        raise ValueError(f"a frame holds a flat tensor, not {tuple(x.shape)}")
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.float32:
        return x.numpy().view(np.uint32)
    narrow = x.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    rest = (narrow & np.uint32(0x7FFF)) << np.uint32(BASES[x.dtype])
    return rest | (narrow >> np.uint32(15)) << np.uint32(31)


def tensor_of(words: NDArray[np.uint32], dtype: torch.dtype) -> Tensor:
    """Convert words back to a tensor of `dtype`; the inverse of `words_of`."""
    if dtype == torch.float32:
        return torch.from_numpy(words.view(np.float32))
    rest = (words & np.uint32(0x7FFFFFFF)) >> np.uint32(BASES[dtype])
    narrow = (rest | words >> np.uint32(31) << np.uint32(15)).astype(np.uint16)
    return torch.from_numpy(narrow.view(np.int16)).view(dtype)


def rounded(x: Tensor, dropped: Dropped, flush: bool, *, explicit: bool = False) -> Tensor:
    """Round x (numel,) to the tensor that the receiver of its frame decodes; returns a new one. Arguments and
    errors are those of `drops_of`.

    >>> rounded(torch.tensor([1.75, -0.0, 1e-40]), 22, flush=True)
    tensor([2., 0., 0.])
    >>> thresholds = torch.tensor([150, 150, 150], dtype=torch.uint8)  # multiples of 1
    >>> rounded(torch.tensor([1.75, -20.5, 0.4]), thresholds, flush=True)
    tensor([  2., -20.,   0.])
    """
    drops = drops_of(dropped, x, explicit=explicit, flush=flush)
    return tensor_of(frames.round_words(words_of(x), drops), x.dtype).to(x.device)


def symbols_of(x: Tensor, dropped: Dropped = 0, *, explicit: bool = False, flush: bool = False) -> Tensor:
    """The symbol of each element of x (numel,) after rounding: uint8 (numel,). Arguments and errors are those
    of `drops_of`.

    >>> symbols_of(torch.tensor([0.0, 1.0, -3.0, 1e-40, float("inf")]))
    tensor([  0, 127, 128, 254, 255], dtype=torch.uint8)
    """
    drops = drops_of(dropped, x, explicit=explicit, flush=flush)
    return torch.from_numpy(frames.symbols_of(words_of(x), drops))


def histogram(x: Tensor, dropped: Dropped = 0, *, explicit: bool = False, flush: bool = False) -> Tensor:
    """Count the symbols in a frame of x (numel,): int64 (SYMBOLS,), to be summed over ranks. Arguments and
    errors are those of `drops_of`.

    >>> from gradwire.codec.gcomp import SYMBOLS
    >>> counts = histogram(torch.tensor([0.0, 1.0, -1.5, 1e-40]))
    >>> counts[[0, 127, 254]].tolist(), counts.numel()
    ([1, 2, 1], 256)
    """
    return count_symbols(symbols_of(x, dropped, explicit=explicit, flush=flush))
