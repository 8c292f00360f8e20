"""A graph of a simulated device: it records operators and kernels with their tensors and numbers, and runs
them again.

As with CUDA, what is captured does not run, and a replay runs just what was recorded: the same tensors, the
same numbers, and nothing of the Python around them. Memory that was let go of may be used again by what is
allocated later in the same pool: so a replay that writes to it overwrites that. Kernels are seen only
`within_kernels`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gradwire.kernels import dispatch
from gradwire.kernels.dispatch import Kernels

WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")
_GARBAGE = 0xA5


class Capturing(Protocol):
    """A device that knows whether it captures, and all that it has recorded."""

    capturing: bool
    recorded: list[Recording]


class _Now(threading.local):
    """The recording that this thread captures."""

    recording: Recording | None = None


_NOW = _Now()


class _Done(NamedTuple):
    """An operator or a kernel, with all that it took and left."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: Any
    touched: list[_Memory]
    """Memory of the pool that no earlier call of this recording has touched."""

    def again(self) -> None:
        """Run it, and leave what it makes in the tensors of that time."""
        made = self.function(*self.arguments, **self.named)
        for old, new in zip(_tensors(self.result), _tensors(made), strict=True):
            if old is not new:
                old.copy_(new)


def _uses(tensor: Tensor) -> int:
    """References to its storage: its tensors, and perhaps the Python object."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


_ALONE = _uses(torch.empty(1))
"""Of a tensor that shares its storage with no other."""


class _Memory:
    """Memory that was allocated in a pool, and whether it has floating-point numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self.whole, self._is_floating = _whole(tensor), tensor.is_floating_point()
        self.aliases = 1
        """Tensors of it that recordings keep. The program under test has let go of it if it has no others."""
        self.heirs: list[_Memory] = []
        """What was allocated since then, and may be in the same place."""

    @property
    def is_free(self) -> bool:
        """Whether the program has let go of it."""
        return _uses(self.whole) == self.aliases - 1 + _ALONE

    def alias(self, tensor: Tensor) -> Tensor:
        """The same elements in a tensor that is the recording's own."""
        self.aliases += 1
        where = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(*where)

    def spoil(self) -> None:
        """Leave garbage, or zeros if it may be read as indices."""
        self.whole.fill_(_GARBAGE if self._is_floating else 0)


Pool = dict[int, _Memory]
"""Memory by the number of its storage."""


class Recording:
    """See `gradwire.kernels.graphs.Graph`."""

    def __init__(self, device: Capturing, pool: Pool) -> None:
        self._device, self._pool = device, pool
        self.done: list[_Done] = []
        self.replays = self._bytes = 0
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """Memory that was there, whole, and what was in it."""
        self._fresh: dict[int, _Memory] = {}
        """Memory that was allocated."""
        self._touched: set[int] = set()
        self._modes = ExitStack()

    @property
    def nbytes(self) -> int:
        """Of the memory that was allocated while it was captured."""
        return self._bytes

    def begin(self) -> None:
        """See `Graph`."""
        assert not self.done, "captured once"
        self._device.capturing, _NOW.recording = True, self
        self._modes.enter_context(_disable_current_modes())
        self._modes.enter_context(_Operators(self))

    def end(self) -> None:
        """See `Graph`. Memory is left as it was. If it is new, it is spoilt."""
        self._modes.close()
        self._device.capturing, _NOW.recording = False, None
        with _disable_current_modes():
            for whole, content in self._before.values():
                whole.copy_(content)
            for each in self._fresh.values():
                each.spoil()
        self._bytes = sum(each.whole.nbytes for each in self._fresh.values())
        self._before, self._fresh = {}, {}

    def replay(self) -> None:
        """See `Graph`."""
        self.replays += 1
        for each in self.done:
            for memory in each.touched:
                for heir in memory.heirs:
                    heir.spoil()
            each.again()

    def kernel(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Record a kernel, which is one whatever it does. It has scratch, of which it lets go."""
        with _disable_current_modes():
            result = self.record(function, arguments, named)
            self.made(scratch := torch.empty(1))
            self.done[-1].touched.append(self._pool[scratch.untyped_storage()._cdata])
            return result

    def record(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Record a call, and let it shape what it makes."""
        for each in _tensors((arguments, named)):
            self._keep(each)
        result = function(*arguments, **named)
        self.made(result)
        known: dict[int, Tensor] = {}
        touched = []

        def ours(value: Any) -> Any:
            memory = self._pool.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None
            if memory is None:
                return value
            number = id(memory)
            if number not in self._touched:
                self._touched.add(number)
                touched.append(memory)
            if id(value) not in known:
                known[id(value)] = memory.alias(value)
            return known[id(value)]

        with _disable_current_modes():
            self.done.append(_Done(function, *tree_map(ours, (arguments, named, result)), touched))
        return result

    def made(self, result: Any) -> None:
        """Note what is new in the result of a call."""
        for each in _tensors(result):
            number = each.untyped_storage()._cdata
            if number not in self._before and number not in self._pool:
                memory = self._fresh[number] = _Memory(each)
                for older in self._pool.values():
                    if older.is_free:
                        older.heirs.append(memory)
                self._pool[number] = memory

    def _keep(self, tensor: Tensor) -> None:
        number = tensor.untyped_storage()._cdata
        if number not in self._fresh and number not in self._before:
            whole = _whole(tensor)
            self._before[number] = whole, whole.clone()


class Recordings:
    """See `gradwire.kernels.graphs.Graphs`."""

    def __init__(self, device: Capturing) -> None:
        self._device = device
        self._made: list[Recording] = []

    def __call__(self) -> Callable[[], Recording]:
        """Maker of recordings with a pool, of which the device knows."""
        return partial(self._one, {})

    def _one(self, pool: Pool) -> Recording:
        self._made.append(Recording(self._device, pool))
        self._device.recorded.append(self._made[-1])
        return self._made[-1]

    def memory_bytes(self) -> int:
        """Of all of them."""
        return sum(each.nbytes for each in self._made)


class _Operators(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        if name in WAITS:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")
        if operator.is_view:
            return operator(*args, **(kwargs or {}))
        if name.startswith(("empty", "new_empty")):
            result = operator(*args, **(kwargs or {}))
            self._recording.made(result)
            return result
        return self._recording.record(operator, args, kwargs or {})


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of its memory."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@contextmanager
def within_kernels() -> Iterator[None]:
    """Within it kernels are in plain torch, and are seen by the recording of their thread: as one each, or by
    their operators if no plan has chosen them. Objects that chose kernels before are not changed. Those for
    the CPU would tell in words of the host what a device tells in tensors; so would who leads.
    """

    def missing(kernels: Kernels, contract: Any) -> Callable[..., Any]:
        function = contract.plain

        def kernel(*arguments: Any, **named: Any) -> Any:
            recording = _NOW.recording
            if recording is None:
                return function(*arguments, **named)
            return recording.kernel(function, arguments, named)

        kernels[contract] = kernel
        return kernel

    dispatch.kernels_for.cache_clear()
    with (
        patch("gradwire.exchange.leader.leads", lambda norms, rank: norms.argmax() == rank),
        patch.object(dispatch, "fits", lambda _arguments, _types: False),
        patch.object(Kernels, "__missing__", missing),
    ):
        yield
    dispatch.kernels_for.cache_clear()
