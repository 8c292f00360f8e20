"""One contract, several implementations: which of them computes for the tensors of a call.

`reference/` holds the contracts: docstring, example, and plain torch for every device and type. `cpu/` and
`device/` hold functions of the same names and signatures. A function that does not take the tensors of a
call, because of their device, type or strides, returns `DECLINED`, and the reference computes. The reference
also computes what a folder lacks. `device/` needs Triton, and is imported with the first CUDA tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

_LOG = logging.getLogger("gradwire")


class Declined(Enum):
    """An implementation returns this for tensors that it does not take; it has changed nothing then."""

    DECLINED = "declined"


DECLINED: Final = Declined.DECLINED

P = ParamSpec("P")
R = TypeVar("R")
Contract = TypeVar("Contract", bound=Callable[..., Any])
Check = Callable[..., None]

_CHECKS: dict[Callable[..., Any], Check] = {}


def checked(check: Check) -> Callable[[Contract], Contract]:
    """A decorator for a contract: every implementation is called only with what `check` lets pass.

    Kernels check no bounds. `check` takes the contract's arguments and raises `ValueError` for those with
    which a kernel would leave its memory. The contract itself stays as it is.
    """

    def declared(contract: Contract) -> Contract:
        _CHECKS[contract] = check
        return contract

    return declared


def declines(*_arguments: Any, **_named: Any) -> Declined:
    """An implementation that takes nothing."""
    return DECLINED


def on_device(name: str) -> Callable[..., Any]:
    """The function `name` of `device/`, imported when it is first called: with CUDA tensors only.

    It declines where the folder lacks it, where Triton is missing, which CUDA builds of torch bring along on
    Linux, and where Triton cannot build what launches kernels, for want of a C compiler for instance.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        kernels = _device_kernels(_place_of(arguments))
        return DECLINED if kernels is None else getattr(kernels, name, declines)(*arguments, **named)

    return call


def _place_of(arguments: Iterable[Any]) -> torch.device | None:
    """The device of the first tensor of a call: `asks_device` has found one."""
    for each in arguments:
        first = each[0] if isinstance(each, list | tuple) and each else each
        if isinstance(first, Tensor):
            return first.device
    return None


@cache
def _device_kernels(where: torch.device | None) -> ModuleType | None:
    """With a trial on that device, because on the thread's current one it could make a context."""
    if find_spec("triton") is None:
        return None
    try:
        kernels = import_module("gradwire.kernels.device")
        import_module("gradwire.kernels.device.launch").try_out(where)
    except Exception as error:  # or the first step would fail on all ranks
        _LOG.warning("Triton runs no kernels here, so plain torch computes instead, more slowly: %r", error)
        return None
    return kernels


def dispatched(
    contract: Callable[P, R],
    implementation: Callable[P, R | Declined],
    device: Callable[..., Any] = declines,
) -> Callable[P, R]:
    """`contract`, computed by `implementation`, or else `device`, wherever these take the tensors.

    `device` is asked only if the first tensor of the call is a CUDA tensor.

    >>> def double(x: Tensor) -> Tensor:
    ...     return x + x
    >>> def double_float32(x: Tensor) -> Tensor | Declined:
    ...     return x.mul(2.0) if is_fast(x) else DECLINED
    >>> dispatched(double, double_float32)(torch.tensor([3]))
    tensor([6])
    """
    check, parameters = _CHECKS.get(contract), signature(contract).parameters.values()
    taken = [each.name for each in parameters if each.kind != each.KEYWORD_ONLY]
    named = [each.name for each in parameters if each.kind == each.KEYWORD_ONLY]
    given = ", ".join([*taken, *(f"{name}={name}" for name in named)])
    # Written out, as `dataclass` does it: collecting and unpacking arguments takes 0.2 to 0.5 µs more a call.
    source = f"""def call({", ".join([*taken, *(["*"] if named else []), *named])}):
    {f"_check({given})" if check else "pass"}
    found = _implementation({given})
    if found is _DECLINED and {asks_device(contract)}:
        found = _device({given})
    return _contract({given}) if found is _DECLINED else found
"""
    names = {
        "_check": check,
        "_implementation": implementation,
        "_device": device,
        "_contract": contract,
        "_DECLINED": DECLINED,
    }
    exec(source, names)
    call: Any = wraps(contract)(cast(Callable[P, R], names["call"]))
    for defaults in ("__defaults__", "__kwdefaults__"):
        setattr(call, defaults, getattr(contract, defaults))
    return cast(Callable[P, R], call)


def asks_device(contract: Callable[..., Any]) -> str:
    """An expression of a contract's arguments: whether the first tensor among them is a CUDA tensor.

    >>> def double(number: int, x: Tensor) -> Tensor: ...
    >>> asks_device(double)
    'x.is_cuda'
    """
    for each in signature(contract).parameters.values():
        kind = str(getattr(each.annotation, "__name__", each.annotation)).replace("torch.Tensor", "Tensor")
        if kind == "Tensor":
            return f"{each.name}.is_cuda"
        if kind.startswith(("tuple[Tensor", "list[Tensor", "Sequence[Tensor")):
            return f"({each.name} and {each.name}[0].is_cuda)"
    return "False"


def front(name: str) -> Callable[..., Any]:
    """The contract `name`, computed by whichever implementation takes the tensors of a call."""
    folders = import_module("gradwire.kernels.reference"), import_module("gradwire.kernels.cpu")
    contract, implementation = (getattr(folder, name, declines) for folder in folders)
    return dispatched(contract, implementation, on_device(name))


def is_fast(*tensors: Tensor) -> bool:
    """Whether all are contiguous float32 tensors on the CPU.

    >>> is_fast(torch.zeros(4)), is_fast(torch.zeros(4)[::2]), is_fast(torch.zeros(4, dtype=torch.float64))
    (True, False, False)
    """
    for t in tensors:  # noqa: SIM110 - a generator takes twice as long, and this precedes every kernel
        if t.dtype != torch.float32 or not t.is_cpu or not t.is_contiguous():
            return False
    return True


def is_native(*tensors: Tensor) -> bool:
    """Whether all are contiguous tensors on the CPU, of any type: for kernels of integers."""
    for t in tensors:  # noqa: SIM110 - as above
        if not t.is_cpu or not t.is_contiguous():
            return False
    return True


def rounded(threshold: float, dtype: torch.dtype) -> float:
    """`threshold` in the type that it is compared in; raises unless it is a number that is 0 or more.

    >>> rounded(0.1, torch.float16), rounded(1e6, torch.float16)
    (0.0999755859375, inf)
    """
    if not threshold >= 0.0:
        raise ValueError(f"threshold={threshold} is not 0 or more; magnitudes are compared with it")
    # The absolute value turns -0.0, whose bits are those of the smallest integer, into 0.0.
    return abs(float(torch.tensor(threshold, dtype=dtype, device="cpu")))
