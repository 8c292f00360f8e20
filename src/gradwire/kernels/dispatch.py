"""One contract, several twins: which of them computes for the tensors of a call.

A file of `kernels/` holds the contracts of a subject: docstring, example, check, and plain torch for every
device and type. `cpu/` and `device/` may have a file of the same name with twins: functions of the contracts'
names and signatures. A twin that does not take the tensors of a call, because of their device, type or
strides, has changed nothing and returns `NotImplemented`. Then the next one is asked: the CPU's, the
device's if the tensors are there, and at last the contract. Files of twins are imported when they are first
asked, so that Numba and Triton are loaded by those who need them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

_LOG = logging.getLogger("gradwire")

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class OnFirstUse:
    """The module `name`, which is imported when something of it is first asked for.

    Numba takes a quarter of a second to import: a process that only predicts what a recipe sends needs none.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, item: str) -> Any:
        found = getattr(import_module(self._name), item)
        setattr(self, item, found)
        return found


class Contract(Protocol[P, R_co]):
    """A contract as it is called: checked, and computed by the twin that takes the tensors."""

    @property
    def plain(self) -> Callable[P, R_co]:
        """The function as it is written, in plain torch: neither checked nor computed by a twin."""

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R_co: ...


def contract(check: Callable[..., None] | None = None) -> Callable[[Callable[P, R]], Contract[P, R]]:
    """A decorator for the contract of a kernel.

    Kernels check no bounds. `check` takes the arguments and raises `ValueError` for those with which a kernel
    would leave its memory.

    >>> @contract()
    ... def double(x: Tensor) -> Tensor:
    ...     return x + x
    >>> double(torch.tensor([3])), double.plain(torch.tensor([3]))
    (tensor([6]), tensor([6]))
    """

    def with_twins(plain: Callable[P, R]) -> Contract[P, R]:
        home, _, subject = plain.__module__.rpartition(".")
        name = plain.__name__

        on_cpu: Callable[..., Any]

        def first_call(*arguments: Any, **named: Any) -> Any:
            nonlocal on_cpu
            on_cpu = _twin(f"{home}.cpu.{subject}", name)
            return on_cpu(*arguments, **named)

        on_cpu = first_call

        def declined(*arguments: Any, **named: Any) -> Any:
            where = _device_of((*arguments, *named.values()))
            if where is not None:
                found = _device_twin(f"{home}.device.{subject}", name, where)(*arguments, **named)
                if found is not NotImplemented:
                    return found
            return plain(*arguments, **named)

        @wraps(plain)
        def call(*arguments: Any, **named: Any) -> Any:
            # Handing on an empty dictionary takes time, too.
            if named:
                if check is not None:
                    check(*arguments, **named)
                found = on_cpu(*arguments, **named)
            else:
                if check is not None:
                    check(*arguments)
                found = on_cpu(*arguments)
            return declined(*arguments, **named) if found is NotImplemented else found

        attributes: Any = call
        attributes.plain = plain
        front: Contract[P, R] = attributes
        return front

    return with_twins


def _device_of(arguments: Iterable[Any]) -> torch.device | None:
    """The device of the first tensor of a call, or of the first in a list or tuple, if that is a GPU."""
    for each in arguments:
        first = each[0] if isinstance(each, list | tuple) and each else each
        if isinstance(first, Tensor):
            return first.device if first.is_cuda else None
    return None


def _twin(home: str, name: str) -> Callable[..., Any]:
    """The function `name` of the module `home`; without that, or without Numba, one that declines.

    One that is there and cannot be imported is an error: on other ranks it may work, with other bits.
    """
    if find_spec(home) is None:
        return _declines
    try:
        return getattr(import_module(home), name, _declines)
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        _say_once(str(error))
        return _declines


@cache
def _say_once(error: str) -> None:
    _LOG.warning("kernels are missing here, so plain torch computes instead, more slowly: %s", error)


def _declines(*_arguments: Any, **_named: Any) -> Any:
    return NotImplemented


@cache
def _device_twin(home: str, name: str, where: torch.device) -> Callable[..., Any]:
    """As `_twin`; one that declines also where Triton can launch nothing."""
    return _twin(home, name) if find_spec(home) is not None and _launches(where) else _declines


@cache
def _launches(where: torch.device) -> bool:
    """Whether Triton can launch kernels on this GPU.

    CUDA builds of torch bring it along on Linux. It is tried there, because on the thread's current GPU it
    could make a context. It may fail for want of a C compiler, for instance.
    """
    if find_spec("triton") is None:
        return False
    try:
        import_module("gradwire.kernels.device.trial").try_out(where)
    except Exception as error:  # or the first step would fail on all ranks
        _LOG.warning("Triton runs no kernels here, so plain torch computes instead, more slowly: %r", error)
        return False
    return True


def is_fast(*tensors: Tensor) -> bool:
    """Whether all are contiguous float32 tensors on the CPU.

    >>> is_fast(torch.zeros(4)), is_fast(torch.zeros(4)[::2]), is_fast(torch.zeros(4, dtype=torch.float64))
    (True, False, False)
    """
    for t in tensors:  # noqa: SIM110 - a generator takes twice as long, and this precedes every kernel
        if t.dtype is not _FLOAT32 or not t.is_cpu or not t.is_contiguous():
            return False
    return True


_FLOAT32 = torch.float32
"""Types are single objects, which `is` compares faster than torch does."""


def is_native(*tensors: Tensor) -> bool:
    """Whether all are contiguous tensors on the CPU, of any type: for kernels of integers."""
    for t in tensors:  # noqa: SIM110 - as above
        if not t.is_cpu or not t.is_contiguous():
            return False
    return True
