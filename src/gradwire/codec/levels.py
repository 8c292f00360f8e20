"""Steps and codes of a quantized unit in one byte buffer, so that both travel in one collective."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from gradwire.codec.scaled import Scaled
from gradwire.kernels import Grid, add_quantized, quantize, step_type
from gradwire.moment import Moment


@dataclass(frozen=True)
class Levels:
    """The steps of all buckets in `dtype`, then all codes.

    >>> Levels(Grid((1000, 3), bucket=512, bits=4), torch.float32).bytes
    516
    """

    grid: Grid
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of the payload."""
        return self._layout.bytes

    @cached_property
    def _layout(self) -> Scaled:
        return Scaled(self.grid.buckets, self.grid.code_bytes, self.dtype)

    def write(self, x: Tensor, at: Moment, *, subtract: bool) -> Tensor:
        """A new payload (bytes,) uint8 of x (numel,), which keeps what is not in it if `subtract`."""
        payload = self._layout.empty(x.device)
        # One draw for all of a unit: elements differ by their index in it.
        key = int(torch.randint(2**63 - 1, (), generator=at.private()))
        quantize(x, self.grid, key, *self._layout.split(payload), subtract=subtract)
        return payload

    def add(self, payload: Tensor, out: Tensor, weight: float) -> None:
        """out (numel,) += weight times what the payload says."""
        if out.numel():  # an empty row of a gathered buffer has an odd storage offset, which no view allows
            add_quantized(*self._layout.split(payload), self.grid, out, weight)


@lru_cache(maxsize=4096)  # what a unit is made of is the same in every step
def levels_of(grid: Grid, dtype: torch.dtype) -> Levels:
    """The layout for tensors of `dtype`: steps are float64 for float64, else float32."""
    return Levels(grid, step_type(dtype))
