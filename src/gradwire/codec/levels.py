"""Steps and codes of a quantized unit in one byte buffer, so that both travel in one collective."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from gradwire.kernels import Grid, add_quantized, quantize, step_type
from gradwire.moment import Moment


@dataclass(frozen=True)
class Levels:
    """The steps of all buckets in `dtype`, then all codes, then zeros up to a multiple of a step's size.

    The padding aligns the steps of every row where several payloads are the rows of one buffer.

    >>> Levels(Grid((1000, 3), bucket=512, bits=4), torch.float32).bytes
    516
    """

    grid: Grid
    dtype: torch.dtype

    @cached_property
    def bytes(self) -> int:
        """Size of the payload."""
        return -(-self._stop // self.dtype.itemsize) * self.dtype.itemsize

    @cached_property
    def _start(self) -> int:
        return self.grid.buckets * self.dtype.itemsize

    @cached_property
    def _stop(self) -> int:
        return self._start + self.grid.code_bytes

    def write(self, x: Tensor, at: Moment, *, subtract: bool) -> Tensor:
        """A new payload (bytes,) uint8 of x (numel,), which keeps what is not in it if `subtract`."""
        payload = torch.empty(self.bytes, dtype=torch.uint8, device=x.device)
        payload[self._stop :] = 0
        # One draw for all of a unit: elements differ by their index in it.
        key = int(torch.randint(2**63 - 1, (), generator=at.private()))
        quantize(x, self.grid, key, *self._parts(payload), subtract=subtract)
        return payload

    def add(self, payload: Tensor, out: Tensor, weight: float) -> None:
        """out (numel,) += weight times what the payload says."""
        if out.numel():  # an empty row of a gathered buffer has an odd storage offset, which no view allows
            add_quantized(*self._parts(payload), self.grid, out, weight)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Steps and codes, as views."""
        return payload[: self._start].view(self.dtype), payload[self._start : self._stop]


@lru_cache(maxsize=4096)  # what a unit is made of is the same in every step
def levels_of(grid: Grid, dtype: torch.dtype) -> Levels:
    """The layout for tensors of `dtype`: steps are float64 for float64, else float32."""
    return Levels(grid, step_type(dtype))
