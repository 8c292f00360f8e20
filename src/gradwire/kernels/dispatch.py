"""Contracts of kernels and their twins: which of them computes for tensors of a device and a type.

A file of `kernels/` holds the contracts of a subject: docstring, example, check, and plain torch for every
device and type. A file of the same name in `cpu/` or `device/` holds twins: functions with the contracts'
names and signatures.

- A twin in `cpu/` takes contiguous CPU tensors, whose floats are float32, or of the types given to `takes`.
- A twin in `device/` takes tensors of a GPU. It returns `NotImplemented`, and has changed nothing, if the
  types, strides or sizes do not suit it.
- In all other cases the contract computes, in plain torch.

A plan chooses once, by device and type: `Kernels`. A contract called directly checks its arguments and looks
at each tensor. Files of twins are imported on first use, so that only their users load Numba and Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from gradwire.environment import checks_kernels

_LOG = logging.getLogger("gradwire")

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])


class OnFirstUse:
    """Proxy of the module `name`, which is imported when an attribute is first read.

    Importing Numba takes a quarter of a second, and a process that only predicts needs none of it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, item: str) -> Any:
        found = getattr(import_module(self._name), item)
        setattr(self, item, found)
        return found


class Contract(Protocol[P, R_co]):
    """A contract as callers see it: checks its arguments, then calls the twin that takes the tensors."""

    @property
    def plain(self) -> Callable[P, R_co]:
        """The decorated function in plain torch, without check and without twins."""

    def on(self, device: torch.device, dtype: torch.dtype) -> Callable[P, R_co]:
        """Choose the function for contiguous tensors of `dtype` on `device`: a twin or plain torch, without
        checks.
        """

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R_co: ...


class Kernels(dict["Contract[..., Any]", "Callable[..., Any]"]):
    """Kernels for contiguous tensors of one type on one device: a mapping from contracts to functions.

    Each function is chosen on first use. `GRADWIRE_CHECK_KERNELS=1` in the environment makes them check their
    arguments. Without a device, the functions are the contracts themselves, which choose in each call.

    >>> from gradwire.kernels.topk import topk_indices
    >>> kernels = Kernels(torch.device("cpu"), torch.float32)
    >>> kernels[topk_indices](torch.tensor([1.0, -3.0, 2.0]), 1)
    tensor([1])
    >>> Kernels()[topk_indices] is topk_indices
    True
    """

    def __init__(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._device, self._dtype = device, dtype

    if TYPE_CHECKING:

        def __getitem__(self, contract: Contract[P, R], /) -> Callable[P, R]: ...

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __missing__(self, contract: Contract[..., Any]) -> Callable[..., Any]:
        found = contract if self._device is None else contract.on(self._device, self._dtype)
        self[contract] = found
        return found

    def of(self, dtype: torch.dtype) -> Kernels:
        """Kernels for another type on the same device."""
        return self if self._device is None else kernels_for(self._device, dtype)


@cache
def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels for contiguous tensors of `dtype` on `device`."""
    return Kernels(device, dtype)


def forget() -> None:
    """Choose kernels anew from now on, and look again where Triton can launch: tests change what there is.

    Twins for the CPU that were found stay.
    """
    for known in (kernels_for, _device_twin, _launches):
        known.cache_clear()


GPUS = ("cuda",)
"""Types of devices on which twins in `device/` compute."""

LOOKING = Kernels()
"""The contracts themselves: they look at the device, type and layout of the tensors in each call."""


def takes(*types: torch.dtype) -> Callable[[F], F]:
    """Decorate a twin in `cpu/` that takes floats of these types, and not of float32 alone.

    >>> @takes(torch.float32, torch.float64)
    ... def twin(x: Tensor) -> Tensor:
    ...     return x
    >>> _types_of(twin)
    (torch.float32, torch.float64)
    """

    def declared(twin: F) -> F:
        twin.types = types  # type: ignore[attr-defined]
        return twin

    return declared


def contract(check: Callable[..., None] | None = None) -> Callable[[Callable[P, R]], Contract[P, R]]:
    """Decorator that makes a function of plain torch the contract of a kernel.

    A call of the result runs the twin of the same name in `cpu/` (Numba) or `device/` (Triton), if one takes
    the arguments. Otherwise it runs the decorated function, which is also `plain` of the result.

    Kernels check no bounds. `check` takes the same arguments and raises `ValueError` for those with which a
    kernel would read or write outside its tensors.

    >>> @contract()
    ... def double(x: Tensor) -> Tensor:
    ...     return x + x
    >>> double(torch.tensor([3])), double.plain(torch.tensor([3]))
    (tensor([6]), tensor([6]))
    """

    def with_twins(plain: Callable[P, R]) -> Contract[P, R]:
        home, _, subject = plain.__module__.rpartition(".")
        name = plain.__name__
        for_cpu = cache(lambda: _twin(f"{home}.cpu.{subject}", name))

        def for_device(where: torch.device) -> Callable[..., Any]:
            twin = _device_twin(f"{home}.device.{subject}", name, where)
            if twin is None:
                return plain
            unless_declined = getattr(twin, "unless_declined", None) or partial(_unless_declined, twin)
            return partial(unless_declined, plain)

        def choose(arguments: Iterable[Any]) -> Callable[..., Any]:
            twin = for_cpu()
            if twin is not None and fits(arguments, _types_of(twin)):
                return twin
            where = _device_of(arguments)
            return plain if where is None else for_device(where)

        def on(device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
            twin = for_cpu() if device.type == "cpu" else None
            types: tuple[torch.dtype, ...] = ()
            found: Callable[..., Any] = for_device(device) if device.type in GPUS else plain
            if twin is not None and dtype in _types_of(twin):
                found, types = twin, _types_of(twin)
            return _checked(found, check, types) if checks_kernels() else found

        @wraps(plain)
        def call(*arguments: Any, **named: Any) -> Any:
            # Handing on an empty dictionary takes time, too.
            if named:
                if check is not None:
                    check(*arguments, **named)
                return choose((*arguments, *named.values()))(*arguments, **named)
            if check is not None:
                check(*arguments)
            return choose(arguments)(*arguments)

        attributes: Any = call
        attributes.plain, attributes.on = plain, on
        front: Contract[P, R] = attributes
        return front

    return with_twins


def fits(arguments: Iterable[Any], types: tuple[torch.dtype, ...]) -> bool:
    """True if all tensors in `arguments` are contiguous, on the CPU, and have no float type but `types`.

    >>> x, floats = torch.zeros(4), (torch.float32,)
    >>> fits([x, torch.tensor(1), 2.0], floats), fits([x[::2]], floats)
    (True, False)
    """
    for each in arguments:
        if isinstance(each, Tensor):
            if not (each.is_cpu and each.is_contiguous()):
                return False
            if each.dtype not in types and each.is_floating_point():
                return False
        elif (
            isinstance(each, list | tuple) and each and isinstance(each[0], Tensor) and not fits(each, types)
        ):
            return False
    return True


def _checked(
    function: Callable[..., Any], check: Callable[..., None] | None, types: tuple[torch.dtype, ...]
) -> Callable[..., Any]:
    """Wrap `function` in checks: run `check`, and raise `TypeError` unless `fits` accepts the tensors for
    `types`.

    No `types` means tensors of any device, type and layout.
    """

    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        if check is not None:
            check(*arguments, **named)
        if types and not fits((*arguments, *named.values()), types):
            raise TypeError(f"{function.__name__} was chosen for other tensors than these")
        return function(*arguments, **named)

    return checked


def _unless_declined(
    twin: Callable[..., Any], plain: Callable[..., Any], /, *arguments: Any, **named: Any
) -> Any:
    found = twin(*arguments, **named)
    return plain(*arguments, **named) if found is NotImplemented else found


def _device_of(arguments: Iterable[Any]) -> torch.device | None:
    """The device of the first tensor among the arguments or in their lists and tuples, if it is a GPU; else
    `None`.
    """
    for each in arguments:
        first = each[0] if isinstance(each, list | tuple) and each else each
        if isinstance(first, Tensor):
            return first.device if first.is_cuda else None
    return None


def _types_of(twin: Callable[..., Any]) -> tuple[torch.dtype, ...]:
    """Float types that a twin in `cpu/` takes."""
    types: tuple[torch.dtype, ...] = getattr(twin, "types", _FLOAT32)
    return types


_FLOAT32 = (torch.float32,)


def _twin(home: str, name: str) -> Callable[..., Any] | None:
    """Import the twin `name` from the module `home`; `None` if there is none, or no Numba.

    A module that exists and fails to import raises: other ranks may be able to import it, and would get other
    bits.
    """
    if find_spec(home) is None:
        return None
    try:
        found: Callable[..., Any] | None = getattr(import_module(home), name, None)
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        _say_once(str(error))
        return None
    return found


@cache
def _say_once(error: str) -> None:
    _LOG.warning("kernels are missing here, so plain torch computes instead, more slowly: %s", error)


@cache
def _device_twin(home: str, name: str, where: torch.device) -> Callable[..., Any] | None:
    """The twin `name` of the module `home`, as `_twin` finds it; `None` if Triton cannot run on `where`."""
    return _twin(home, name) if find_spec(home) is not None and _launches(where) else None


@cache
def _launches(where: torch.device) -> bool:
    """True if Triton can launch kernels on this GPU.

    CUDA builds of torch bring Triton along on Linux; it may fail, for want of a C compiler, for instance. The
    trial runs on `where`, because a launch on the thread's current GPU could make a context there.
    """
    if find_spec("triton") is None:
        return False
    try:
        import_module("gradwire.kernels.device.trial").try_out(where)
    except Exception as error:  # or the first step would fail on all ranks
        _LOG.warning("Triton runs no kernels here, so plain torch computes instead, more slowly: %r", error)
        return False
    return True
