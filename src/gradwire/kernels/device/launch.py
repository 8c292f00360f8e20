"""Launching of kernels, and the types of tensors that they take: the border between typed and untyped
code.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from gradwire.kernels.uploads import HOLDING, kept_by_stream, sent_to

F = TypeVar("F", bound=Callable[..., Any])

TILE = 2048
"""Elements per program: with 8 warps, 8 per thread, in two vectors of 16 bytes."""
WARPS = 8

_VERSIONS = ("3.6", "3.7", "3.9")
"""Versions of Triton whose compiled kernels `launch` calls itself: they take the same arguments, and
addresses for tensors."""
BINDS = triton.__version__.rpartition(".")[0] in _VERSIONS and torch.version.hip is None
"""Whether `launch` calls compiled kernels itself. On AMD's GPUs that has not been tried."""
_WITHOUT_LAUNCHER = ("3.6.",)
"""Versions whose launcher, in Python, only allocates scratch memory before it calls a function in C."""
_GRAIN = 16
"""Triton compiles for pointers, and for whole numbers, that are multiples of this."""


class _Bound(NamedTuple):
    """A compiled kernel on one device. `run` takes the grid, the stream, what is in `head`, the kernel's
    arguments, and the constants that follow them. `kernel` is what it was compiled from, whose address stands
    for it in keys."""

    kernel: Any
    run: Any
    head: tuple[Any, ...]
    constants: tuple[Any, ...]


_BOUND: dict[tuple[Any, ...], _Bound | None] = {}
"""Kernels by all that Triton compiles for; `None` for what cannot be bound."""


class _Launched(NamedTuple):
    """A launch: `run` takes the grid, the stream, and `following`. `tensors` are those among the kernel's
    arguments."""

    run: Any
    programs: int
    following: tuple[Any, ...]
    tensors: tuple[Tensor, ...]


class _Notes(threading.local):
    """The launches of this thread, while `bound` asks for them."""

    launches: list[_Launched | None] | None = None
    """`None` in it stands for a launch that cannot be repeated."""


_NOTES = _Notes()


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
        bound = _BOUND[key]
    else:
        stream = torch._C._cuda_getCurrentRawStream(where.index)
        bound.run(programs, 1, 1, stream, *bound.head, *packed, *bound.constants)
    if _NOTES.launches is not None:
        tensors = tuple(each for each in arguments if isinstance(each, Tensor))
        following = () if bound is None else (*bound.head, *packed, *bound.constants)
        _NOTES.launches.append(None if bound is None else _Launched(bound.run, programs, following, tensors))


_MOST_CALLS = 1024
"""Calls of a function that are kept (`bound`): more are made by a loss scale or buckets that change."""


def bound(launching: F) -> F:
    """Decorate a function that allocates nothing, returns `None` or `NotImplemented`, and whose launches
    follow from its arguments: their addresses, shapes and numbers.

    A call that was there before repeats the launches of that time, with all that they were handed. Nothing is
    looked up in tables then, and no type is looked at. A device's tensors are told apart by address, type,
    shape and strides; numbers by their value; all else by identity, also tensors that the host reads, which
    must not change. Tables that launches read are kept as long as all arguments live that are known by
    identity. If somebody traces launches, or if this thread's current device is another one, all goes the
    usual way.

    `unless_declined` of the result calls its first argument instead if the function declines.
    """
    known: dict[tuple[Any, ...], tuple[list[tuple[Any, int, tuple[Any, ...]]], list[Any]]] = {}

    def unless_declined(plain: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        key: list[Any] = [*named]
        where = None
        for argument in (*arguments, *named.values()):
            for each in argument if type(argument) in _GROUPS else (argument,):
                if isinstance(each, Tensor) and each.is_cuda:
                    key += each.data_ptr(), each.dtype, each.shape, each.stride()
                    where = each.device
                elif type(each) in _NUMBERS:
                    key += type(each), each
                else:
                    key.append(id(each))
        if where is None or where.type != "cuda" or where.index != torch._C._cuda_getDevice():
            result = launching(*arguments, **named)
            return plain(*arguments, **named) if result is NotImplemented else result
        stream = torch._C._cuda_getCurrentRawStream(where.index)  # tables are there in one stream only
        key += where, stream
        place, hooks = tuple(key), knobs.runtime
        found = known.get(place)
        is_traced = hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls
        if found is None or is_traced or HOLDING.results is not None:  # who holds tables has to hear of them
            launches, result = _noted(partial(launching, *arguments, **named))
            if launches and None not in launches:
                if len(known) >= _MOST_CALLS:
                    known.clear()
                kept = _kept((*arguments, *named.values()), launches, lambda _gone: known.pop(place, None))
                known[place] = [each[:3] for each in launches], kept
            return plain(*arguments, **named) if result is NotImplemented else result
        for run, programs, following in found[0]:
            run(programs, 1, 1, stream, *following)
        return None

    @wraps(launching)
    def twin(*arguments: Any, **named: Any) -> Any:
        return unless_declined(_decline, *arguments, **named)

    twin.unless_declined = unless_declined  # type: ignore[attr-defined]
    return twin  # type: ignore[return-value]


def _decline(*_arguments: Any, **_named: Any) -> Any:
    return NotImplemented


_NUMBERS = (int, float, bool, type(None))
_GROUPS = (tuple, list)


def _kept(arguments: tuple[Any, ...], launches: list[_Launched], forget: Callable[[Any], Any]) -> list[Any]:
    """The things that are kept as long as the launches can be repeated: tables that they read. `forget` is
    called when an argument that is known by its identity is gone. Memory of the arguments is the caller's."""
    flat = [
        each for argument in arguments for each in (argument if type(argument) in _GROUPS else (argument,))
    ]
    on_device = [each for each in flat if isinstance(each, Tensor) and each.is_cuda]
    given = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in on_device]
    tables = [
        each
        for launched in launches
        for each in launched.tensors
        if not any(begin <= each.data_ptr() < end for begin, end in given)
    ]
    objects = [
        each
        for each in flat
        if not (isinstance(each, Tensor) and each.is_cuda) and type(each) not in _NUMBERS
    ]
    return [*tables, *(weakref.ref(each, forget) for each in objects)]


def _noted(launching: Callable[[], Any]) -> tuple[list[Any], Any]:
    """Call `launching`; returns its launches, and its result."""
    outside, _NOTES.launches = _NOTES.launches, []
    try:
        result = launching()
        return _NOTES.launches, result
    finally:
        _NOTES.launches = outside


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
    run = compiled.run
    before: tuple[Any, ...] = ()
    scratch = run.global_scratch_size, run.profile_scratch_size
    if triton.__version__.startswith(_WITHOUT_LAUNCHER) and scratch == (0, 0):
        before = run.launch_cooperative_grid, run.launch_pdl, None, None
        run = run.launch
    head = (compiled.function, *before, compiled.packed_metadata, None, None, None)
    return _Bound(kernel, run, head, tuple(constants[each] for each in names))


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
    launch leaves 0 for the next launch. It is made by the first of them, not in a captured graph: what is
    captured has run before.
    """
    return sent_to(torch.zeros(1, dtype=torch.int32, device="cpu"), device)
