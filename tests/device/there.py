"""The kernels for devices as their tests call them: interpreted on the CPU, or compiled on `WHERE`.

Tests have their tensors on the CPU in both cases. Where kernels are compiled, `device` carries each call
over: the memory that its tensors share goes there as a whole, so that slices begin where they did, and comes
back as a whole, so that a byte that was written beside a slice shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.twins import Twins
from tests.support.where import WHERE

BYTE = 0x7F
"""What memory holds before it is written: 3.4e38 as float32, out of bounds as an index, and never NaN,
which tests cannot tell from another NaN."""
TABLES = {"left_products": 1, "right_products": 1, "outer_products": 1, "orthonormalise": 1}
"""Which argument of a kernel is a table of where things lie, for the host to read."""
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def memory_of(tensor: Tensor) -> Tensor:
    """All bytes of the memory that `tensor` is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Poisoned(TorchDispatchMode):
    """Memory that torch leaves uninitialised is full of `BYTE`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in _EMPTY and isinstance(out, Tensor) and out.device.type != "meta":
            memory_of(out).fill_(BYTE)
        return out


class Trip:
    """One call's memory, there and back."""

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._carried: dict[int, tuple[Tensor, Tensor]] = {}

    def there(self, value: Any) -> Any:
        """`value` with views of the carried memory for tensors."""
        if isinstance(value, tuple | list):
            return type(value)(map(self.there, value)) if type(value) in (tuple, list) else value
        if not isinstance(value, Tensor):
            return value
        home = memory_of(value)
        if home.numel() == 0:
            return value.to(self._where)
        _, away = self._carried.setdefault(home.data_ptr(), (home, home.to(self._where, copy=True)))
        view = torch.empty(0, dtype=value.dtype, device=self._where)
        return view.set_(away.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    def back(self, result: Any) -> Any:
        """Bring the memory back, and `result`."""
        for home, away in self._carried.values():
            home.copy_(away)
        if isinstance(result, Tensor):
            return result.cpu()
        return tuple(map(self.back, result)) if type(result) is tuple else result


def carried(function: Callable[..., Any], where: torch.device, home: int | None = None) -> Callable[..., Any]:
    """`function` of tensors at `where`, for tensors on the CPU; argument number `home` stays there."""

    def call(*arguments: Any, **named: Any) -> Any:
        trip = Trip(where)
        there = [each if place == home else trip.there(each) for place, each in enumerate(arguments)]
        return trip.back(function(*there, **{name: trip.there(value) for name, value in named.items()}))

    return call


class Carried(Twins):
    """Functions of `gradwire.kernels.device` at `where` that take tensors on the CPU."""

    def __init__(self, where: torch.device) -> None:
        super().__init__("device")
        self._where = where

    def __getattr__(self, name: str) -> Any:
        return carried(super().__getattr__(name), self._where, TABLES.get(name))


device: Any = Twins("device") if WHERE.type == "cpu" else Carried(WHERE)
