"""Chosen elements as one payload of places and values, and back, in one call each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels import cpu
from gradwire.kernels.elias_fano import COUNTS, DECODING, ENCODING, ZEROS_BEFORE, Planes

Form = Literal["list", "bitmap", "coded"]

_FORMS: dict[Form, int] = {"list": cpu.chosen.LIST, "bitmap": cpu.chosen.BITMAP, "coded": cpu.chosen.CODED}
_TYPES = {
    torch.float32: cpu.chosen.FLOAT32,
    torch.float16: cpu.chosen.FLOAT16,
    torch.bfloat16: cpu.chosen.BFLOAT16,
}


@dataclass(frozen=True)
class Shape:
    """`words` int32 words of places in a `form`, then from byte `start` on the values, in `bytes` in all.

    Both begin at whole words. `planes` are those of the coded form; `dtype` is how values travel.
    """

    form: Form
    planes: Planes
    words: int
    start: int
    bytes: int
    dtype: torch.dtype

    @property
    def is_known(self) -> bool:
        """Whether the kernels are made for it: places below 2^31, values of up to 32 bits."""
        return self.planes.numel <= 2**31 and self.dtype in _TYPES

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """All of it, as the kernels take it: an array is the quickest argument."""
        planes = self.planes
        _low, groups, places = planes.starts
        head = (_FORMS[self.form], planes.count, planes.numel, self.words, self.start, _TYPES[self.dtype])
        coded = (planes.low_bits, groups, places, planes.blocks, planes.top, planes.row // 64 + 2)
        return np.array(head + coded, np.int64)


def take_chosen(x: Tensor, indices: Tensor, shape: Shape) -> Tensor:
    """The payload (bytes,) uint8 of float32 x (n,) at ascending `indices` (count,), taken out of x.

    What rounding drops stays in x. `ValueError` when the indices are out of order or range.

    >>> planes = Planes(count=1, numel=3, low_bits=0)
    >>> shape = Shape("list", planes, words=1, start=8, bytes=12, dtype=torch.float16)
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> payload = take_chosen(x, torch.tensor([1]), shape)
    >>> payload.tolist(), x
    ([1, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], tensor([1., 0., 3.]))
    """
    _check(x, shape)
    if indices.numel() != shape.planes.count:
        raise ValueError(f"{indices.numel()} indices do not fit a payload for {shape.planes.count}")
    payload = np.empty(shape.bytes, np.uint8)
    if not cpu.chosen.take_chosen(x.numpy(), indices.numpy(), shape.numbers, ENCODING, payload):
        raise ValueError(f"indices must ascend within 0 … {shape.planes.numel - 1}, without repeats")
    return torch.from_numpy(payload)


def add_chosen(payload: Tensor, shape: Shape, out: Tensor, weight: float = 1.0) -> bool:
    """Add weight · values of a payload (bytes,) to float32 `out` (n,).

    False, and nothing is added, for words that stand for no choice of so many elements.

    >>> planes = Planes(count=1, numel=3, low_bits=0)
    >>> shape = Shape("list", planes, words=1, start=8, bytes=12, dtype=torch.float16)
    >>> payload, out = take_chosen(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1]), shape), torch.ones(3)
    >>> add_chosen(payload, shape, out, 0.5), out
    (True, tensor([1., 2., 1.]))
    """
    _check(out, shape)
    if payload.numel() != shape.bytes:
        raise ValueError(f"a payload of {payload.numel()} bytes where {shape.bytes} are due")
    tables = (DECODING, ZEROS_BEFORE, COUNTS)
    added: bool = cpu.chosen.add_chosen(
        payload.numpy(), shape.numbers, *tables, np.float32(weight), out.numpy()
    )
    return added


def _check(x: Tensor, shape: Shape) -> None:
    if x.numel() != shape.planes.numel:
        raise ValueError(f"{x.numel()} elements where the payload is for {shape.planes.numel}")
