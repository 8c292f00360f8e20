"""What frames are tried on."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec.gcomp import CodeTable, Key, frame, histogram, unframe
from gradwire.codec.gcomp.rounding import Dropped

KEY = Key(step=7, unit=3, hop=2, state=9)
SIZES = (0, 1, 2, 3, 5, 16, 17, 100, 2047, 2049, 4097, 65_536, 65_537, 140_001)


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e-3


def half_zeros(n: int) -> Tensor:
    """Zeros of both signs among others, and numbers below the normal range."""
    x = normal(n) * (normal(n + 1)[:n] > 0)
    x[::7] *= 1e-37
    x[::11] = -0.0
    return x


def any_bits(n: int) -> Tensor:
    words = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(n))
    return words.to(torch.int32).view(torch.float32)


def special(n: int) -> Tensor:
    """NaN with a payload, Inf, the largest and the smallest numbers, and values that round up to a power."""
    x = normal(n)
    kinds = torch.tensor(
        [0x7FC12345, -0x400001, 0x7F800000, -0x800000, 0x7F7FFFFF, 0x7EFFFFFF, 0x3FFFFFFF, 1, 0x00800000]
    )
    x.view(torch.int32)[::3] = kinds.to(torch.int32).repeat(n // 3 + 1)[: len(x[::3])]
    return x


KINDS = (normal, half_zeros, any_bits, special)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    return one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


def there_and_back(
    x: Tensor, dropped: Dropped, *, explicit: bool, flush: bool, table: CodeTable | None = None
) -> Tensor:
    table = table or CodeTable.from_histogram(histogram(x, dropped, explicit=explicit, flush=flush))
    data = frame(x, dropped, table, KEY, explicit=explicit, flush=flush)
    out = torch.full_like(x, 5.0)
    unframe(data, out, None if explicit else dropped, {table.id: table}, KEY)
    return out


def thresholds(n: int, low: int = 90, high: int = 140) -> Tensor:
    return torch.randint(low, high, (n,), generator=torch.Generator().manual_seed(n)).to(torch.uint8)


def levels(n: int) -> Tensor:
    return 6 * torch.randint(0, 4, (n,), generator=torch.Generator().manual_seed(n)).to(torch.uint8)
