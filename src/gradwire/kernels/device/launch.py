"""Launching of kernels, and the types of tensors that they take: the border between typed and untyped
code.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from gradwire.kernels.uploads import kept_by_stream, sent_to

TILE = 2048
"""Elements per program: with 8 warps, 8 per thread, in two vectors of 16 bytes."""
WARPS = 8

_VERSIONS = ("3.6", "3.7", "3.9")
"""Versions of Triton whose compiled kernels `launch` calls itself: they take the same arguments, and
addresses for tensors."""
BINDS = triton.__version__.rpartition(".")[0] in _VERSIONS and torch.version.hip is None
"""Whether `launch` calls compiled kernels itself. On AMD's GPUs that has not been tried."""
_GRAIN = 16
"""Triton compiles for pointers, and for whole numbers, that are multiples of this."""


class _Bound(NamedTuple):
    """A compiled kernel on one device, and the constants that follow its arguments. `kernel` is what it was
    compiled from, whose address stands for it in keys."""

    kernel: Any
    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


_BOUND: dict[tuple[Any, ...], _Bound | None] = {}
"""Kernels by all that Triton compiles for; `None` for what cannot be bound."""


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run `kernel` on a grid of `programs` on the current stream; do nothing if there are none.

    Multiplications and additions are never fused: that would round once where the contracts round twice.
    Constants of the compiled code are keyword arguments, `num_warps` among them, if it is not `WARPS`.

    Triton looks in each launch for the compiled kernel, by names and texts. Here a launch of the kind that
    was there before calls it at once, with the addresses of its tensors. The kind is all that Triton compiles
    for: device, types, multiples of 16, ones, and constants. If somebody traces launches by Triton's hooks,
    all go through Triton.
    """
    if not programs:
        return
    if not BINDS or not isinstance(kernel, JITFunction):
        _through_triton(kernel, programs, arguments, constants)
        return
    kind: list[Any] = [id(kernel), *constants.items()]  # its hash is that of its source, by functions
    packed: list[Any] = []
    where = None
    for each in arguments:
        if isinstance(each, Tensor):
            if where is None:
                where = each.device
            address = each.data_ptr()
            kind += each.dtype, address % _GRAIN
            packed.append(address)
        else:
            if type(each) is int:
                kind += not each % _GRAIN, each == 1, -(1 << 31) <= each < 1 << 31
            else:
                kind.append(type(each))
            packed.append(each)
    assert where is not None, "a kernel works on tensors"
    if where.type != "cuda" or where.index != torch._C._cuda_getDevice():
        _through_triton(kernel, programs, arguments, constants)
        return
    kind.append(where)
    key, hooks = tuple(kind), knobs.runtime
    bound = _BOUND.get(key)
    if bound is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled = _through_triton(kernel, programs, arguments, constants)
        if key not in _BOUND:
            _BOUND[key] = _bind(kernel, compiled, arguments, constants)
        return
    stream = torch._C._cuda_getCurrentRawStream(where.index)
    _kernel, run, function, metadata, following = bound
    run(programs, 1, 1, stream, function, metadata, None, None, None, *packed, *following)


def _through_triton(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """As `launch`, by Triton's own way; returns the compiled kernel."""
    where = next(each.device for each in arguments if isinstance(each, Tensor))
    # Triton launches on the thread's current device, which need not be the one that has the tensors.
    is_current = where.type != "cuda" or where.index == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(where):
        return kernel[(programs,)](*arguments, **{"num_warps": WARPS, **constants}, enable_fp_fusion=False)


def _bind(kernel: Any, compiled: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> _Bound | None:
    """Bind what `launch` calls for `arguments` of this kind from now on; `None` for types that it does not
    tell apart.
    """
    names = kernel.arg_names[len(arguments) :]
    known = all(isinstance(each, Tensor) or type(each) in (int, float) for each in arguments)
    if not known or not all(each in constants for each in names):
        return None
    following = tuple(constants[each] for each in names)
    return _Bound(kernel, compiled.run, compiled.function, compiled.packed_metadata, following)


def is_taken(*tensors: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """True if all `tensors` are contiguous, on one device, and of one of `dtypes`."""
    device = tensors[0].device
    for each in tensors:
        if each.dtype not in dtypes or not each.is_contiguous() or each.device != device:
            return False
    return True


@kept_by_stream(maxsize=64)
def counter_of(device: torch.device) -> Tensor:
    """Counter (1,) int32, 0, of the programs of a launch that have ended, for `is_last`.

    There is one for each stream, as launches of a stream run one after the other. The last program of a
    launch leaves 0 for the next launch. It is made by the first of them, not in a captured graph: steps are
    not captured.
    """
    return sent_to(torch.zeros(1, dtype=torch.int32, device="cpu"), device)
