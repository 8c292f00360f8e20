"""Fields alone: those of a frame, which the slow decoder reads, and back to the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.gcomp import (
    CodeTable,
    frame,
    histogram,
    rounded,
    symbols_of,
)
from gradwire.codec.gcomp.frame import HEADER_BYTES
from tests.support.looped import looped
from tests.unit.codec.gcomp.inputs import KEY, KINDS, levels, normal, same_bits, thresholds
from tests.unit.codec.gcomp.mantissas import exponents_of, pack_mantissas, unpack_mantissas

SHORT = (0, 1, 2, 3, 17, 100, 2049)


def ways(n: int) -> list[tuple[Any, bool, bool]]:
    """What is dropped, whether levels would travel, whether tiny numbers are flushed."""
    return [
        (0, False, False), (9, False, True), (23, False, False), (thresholds(n), False, True),
        (thresholds(n), False, False), (levels(n), True, True),
    ]  # fmt: skip


def again(x: Tensor, dropped: Any, explicit: bool, flush: bool) -> Tensor | None:
    """Packed and unpacked."""
    words = pack_mantissas(x, dropped, explicit=explicit, flush=flush)
    symbols = symbols_of(x, dropped, explicit=explicit, flush=flush)
    exponents = exponents_of(x, dropped, explicit=explicit, flush=flush)
    return unpack_mantissas(words, symbols, exponents, dropped, explicit=explicit, dtype=x.dtype)


@looped("kind", KINDS)
def test_what_is_unpacked_is_the_rounded_value(kind: Callable[[int], Tensor]) -> None:
    for n in SHORT:
        for dropped, explicit, flush in ways(n):
            found = again(kind(n), dropped, explicit, flush)
            assert found is not None
            assert same_bits(found, rounded(kind(n), dropped, flush, explicit=explicit))
        for dtype in (torch.bfloat16, torch.float16):
            found = again(kind(n).to(dtype), 0, False, False)
            assert found is not None
            assert same_bits(found, kind(n).to(dtype))


def test_the_words_are_those_of_a_frame() -> None:
    for n in (100, 2049):  # long enough not to be stored raw
        for dropped, explicit, flush in ways(n):
            x = normal(n)
            table = CodeTable.from_histogram(histogram(x, dropped, explicit=explicit, flush=flush))
            data = frame(x, dropped, table, KEY, explicit=explicit, flush=flush).numpy()
            *sizes, kind = data[-24:-8].view(np.uint16).tolist()
            assert kind == 0
            start = HEADER_BYTES + 8 * sum(sizes[:6])
            words = pack_mantissas(x, dropped, explicit=explicit, flush=flush)
            assert data[start : start + 8 * sizes[6]].view(np.int64).tolist() == words.tolist()


def test_words_that_do_not_fit_are_found_out() -> None:
    x = normal(99)
    words, symbols, exponents = pack_mantissas(x, 12), symbols_of(x, 12), exponents_of(x, 12)
    assert unpack_mantissas(words[:-1], symbols, exponents, 12) is None
    assert unpack_mantissas(torch.cat([words, words[:1]]), symbols, exponents, 12) is None
    # 99 fields of 12 bits leave 28 bits of the last word.
    words[-1] |= 1 << 63 - 27
    assert unpack_mantissas(words, symbols, exponents, 12) is None
    # A step of 2^(200 - 150) makes all of these zero.
    coarse = torch.full((99,), 200, dtype=torch.uint8)
    assert unpack_mantissas(words, symbols, exponents, coarse) is None
