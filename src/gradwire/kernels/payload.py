"""Chosen elements as one payload: where the words of places and the values lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.elias_fano import Planes

Form = Literal["list", "bitmap", "coded"]

# The numbers by which `kernels/cpu/chosen.py` knows them.
_FORMS: dict[Form, int] = {"list": 0, "bitmap": 1, "coded": 2}
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


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

    def parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Words (words,) int32 and values (count,) of a payload (bytes,) uint8, both as views.

        An empty payload must own its memory: as a row of an empty buffer it has an offset that no view
        allows.
        """
        stop = self.start + self.planes.count * self.dtype.itemsize
        return payload[: 4 * self.words].view(torch.int32), payload[self.start : stop].view(self.dtype)

    @cached_property
    def is_narrow(self) -> bool:
        """Whether places are below 2^31 and values have a type of up to 32 bits, as kernels expect."""
        return self.planes.numel <= 2**31 and self.dtype in _TYPES

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """All of it, as the kernels take it: an array is the quickest argument."""
        planes = self.planes
        _low, groups, places = planes.starts
        head = (_FORMS[self.form], planes.count, planes.numel, self.words, self.start, _TYPES[self.dtype])
        coded = (planes.low_bits, groups, places, planes.blocks, planes.top, planes.row // 64 + 2)
        return np.array(head + coded, np.int64)
