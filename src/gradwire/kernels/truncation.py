"""The upper bits of float32, packed without a gap.

A chunk of 32 rows of `LANES` elements becomes words lane by lane: the 32 codes of a column, one after the
other in `width` words, so that packing is the same shift for a whole row (the vertical layout of Lemire and
Boytsov 2015, "Decoding billions of integers per second through vectorization", section 4). The last chunk
has as many lanes as it needs, so fewer than 32 codes are padding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference_truncation
from gradwire.kernels.dispatch import is_fast

LANES = 128
"""32 rows of it, as floats and as codes, stay in the first-level cache."""


def upper_words(numel: int, drop: int) -> int:
    """int32 words of the upper 32 - drop bits of `numel` elements.

    >>> upper_words(4096, 18), upper_words(1, 18)
    (1792, 14)
    """
    return (32 - drop) * -(-numel // 32)


def pack_upper(x: Tensor, drop: int, left: bool) -> Tensor:
    """The upper 32 - drop bits of x (n,) as (upper_words,) int32; with `left`, x keeps the rest.

    What is not float32 is rounded to it first, and held to its largest number; `drop` is 1 … 22.

    >>> x = torch.tensor([1.75, -3.0])
    >>> words = pack_upper(x, 22, left=True)
    >>> x
    tensor([0.2500, 0.0000])
    >>> out = torch.zeros(2)
    >>> add_upper(words, 22, out, 1.0)
    >>> out
    tensor([ 1.5000, -3.0000])
    """
    _check(drop)
    if not is_fast(x):
        return reference_truncation.pack_upper(x, drop, LANES, left)
    words = torch.empty(upper_words(x.numel(), drop), dtype=torch.int32)
    cpu.pack_upper(x.numpy(), drop, LANES, words.numpy().view(np.uint32), left)
    return words


def add_upper(words: Tensor, drop: int, out: Tensor, weight: float) -> None:
    """out (n,) += weight · what `pack_upper` kept in `words`; see there."""
    _check(drop)
    if words.numel() != upper_words(out.numel(), drop) or words.dtype != torch.int32:
        # The kernel checks no bounds.
        raise ValueError(f"{out.numel()} elements take {upper_words(out.numel(), drop)} int32 words")
    if not (is_fast(out) and words.is_contiguous()):
        reference_truncation.add_upper(words, drop, LANES, out, weight)
        return
    cpu.add_upper(words.numpy().view(np.uint32), drop, LANES, np.float32(weight), out.numpy())


def _check(drop: int) -> None:
    if not 1 <= drop <= 22:
        raise ValueError(f"{drop} bits cannot be dropped of 23 bits of mantissa; choose 1 … 22")
