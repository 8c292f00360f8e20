"""A device that executes at once, and finds what a real one might execute in another order.

Its tensors are tensors on the CPU. A dispatch mode, one per thread, sees every operator with the memory that
it reads and writes, by storage and byte interval. The *actors* are the streams and the host, whose threads
count as one: threads are ordered by the program under test, streams by events alone. Each actor has a vector
clock (Mattern 1989; Fidge 1988): how much of every other actor's work is known to be done before its own. Two
accesses to the same bytes, one of them a write, of which neither is known to come first, are a race.

Two rules make a GPU of it. Work on a stream comes after all that the host did before it was enqueued. The
host's work comes after a stream's only once the host has waited for an event. While it captures, it refuses
waits and new memory, as CUDA does or may do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.support.recording import Recording, Recordings

Clock = dict[str, int]
Span = tuple[int, int, int]
"""A storage's number, and the bytes [begin, end) in it."""
Home = Literal["host", "device"]
HOST, DEFAULT = "host", "default stream"

SYNCING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
"""Operators whose result the host waits for."""


@dataclass
class Access:
    """Bytes [begin, end) of a storage, touched by an actor at a time of its own."""

    begin: int
    end: int
    writes: bool
    actor: str
    time: int
    what: str


class SimulatedEvent:
    """See `gradwire.placement.device.StreamEvent`."""

    def __init__(self, device: Simulated) -> None:
        self._device = device
        self.clock: Clock = {}
        self.at_s = 0.0
        self.sleeps = False

    def record(self, stream: SimulatedStream | None = None) -> None:
        """In `stream`, by default the current one."""
        (stream or self._device.current()).record_event(self)

    def synchronize(self) -> None:
        """The host waits."""
        if not (self.sleeps or self._device.has_passed(self.clock)):
            self._device.spun.append(threading.current_thread().name)
        self._device.learn("synchronize", HOST, self.clock)

    def elapsed_time(self, other: SimulatedEvent) -> float:
        """Milliseconds between the host's clock at both. As torch does, it raises for what has not passed."""
        if not (self._device.has_passed(self.clock) and self._device.has_passed(other.clock)):
            raise RuntimeError("an event was never recorded, or the host has not waited for it")
        return 1e3 * (other.at_s - self.at_s)


class SimulatedStream:
    """See `gradwire.placement.device.Stream`."""

    def __init__(self, device: Simulated, name: str) -> None:
        self._device, self.name = device, name

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """Its clock is that of the work enqueued so far."""
        event = event or SimulatedEvent(self._device)
        event.clock, event.at_s = self._device.clock_of(self.name), time.monotonic()
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        """What comes after knows of what was before the event."""
        call = "join" if self.name == DEFAULT else "wait_event"
        self._device.learn(call, self.name, event.clock)

    def wait_stream(self, other: SimulatedStream) -> None:
        """What comes after knows of what is in `other` so far."""
        self.wait_event(other.record_event())

    def __enter__(self) -> None:
        self._device.entered.append(self)

    def __exit__(self, *_: object) -> None:
        self._device.entered.pop()


class SimulatedFuture(Future):  # type: ignore[type-arg]
    """A reader of its tensor in the default stream has waited for it, as DDP does, in C++."""

    def __init__(self, device: Simulated) -> None:
        super().__init__()
        self._device = device

    def set_result(self, result: Tensor) -> None:
        """Note what is current."""
        self._device.promise(result)
        super().set_result(result)


class Simulated:
    """See `gradwire.placement.device.Device`. `deaf` to some calls, it forgets what they order.

    The calls are "wait_event" of a stream that was made, "join" for the same of the default stream,
    "synchronize" of an event, and "set_result" of a future. `races` says what it has found.
    """

    where = torch.device("cuda", 0)
    is_host = False

    def __init__(self, *deaf: str) -> None:
        self.races: list[str] = []
        self.spun: list[str] = []
        """Threads, by name, that have waited for an event other than those that are `awaited`."""
        self.waited: list[str] = []
        """Operators on the device for whose result the host has waited."""
        self.operators = 0
        self.capturing = False
        self.recorded: list[Recording] = []
        self._deaf = deaf
        self._clocks: dict[str, Clock] = {HOST: {HOST: 0}, DEFAULT: {DEFAULT: 0}}
        self._accesses: dict[int, list[Access]] = {}
        self._on_device: dict[int, bool] = {}
        self._promised: dict[int, Clock] = {}
        self._kept: list[Any] = []  # a storage that went could lend its number to another
        self._lock = threading.RLock()
        self._local = threading.local()
        self._default = SimulatedStream(self, DEFAULT)

    # -- what gradwire asks of it

    def current(self) -> SimulatedStream:
        """The stream entered last on this thread."""
        return self.entered[-1] if self.entered else self._default

    def new_stream(self) -> SimulatedStream:
        """One more."""
        name = f"stream {len(self._clocks) - 1}"
        self._clocks[name] = {name: 0}
        return SimulatedStream(self, name)

    @contextmanager
    def using(self, stream: SimulatedStream) -> Iterator[None]:
        """On this thread."""
        with stream:
            yield

    def stay(self) -> None:
        """There is no other."""

    def new_event(self) -> SimulatedEvent:
        """One more."""
        return SimulatedEvent(self)

    def awaited(self, stream: SimulatedStream) -> SimulatedEvent:
        """One for which the host sleeps."""
        event = stream.record_event()
        event.sleeps = True
        return event

    def pinned(self, like: Tensor) -> Tensor:
        """Memory of the host."""
        self._refuse_in_a_graph()
        memory = torch.empty_like(like)
        self._on_device[self._number(memory)] = False
        return memory

    def new_future(self) -> Future[Tensor]:
        """One that notes the current stream."""
        return SimulatedFuture(self)

    def is_capturing(self) -> bool:
        """As told."""
        return self.capturing

    def graphs(self) -> Recordings:
        """Recordings, in which it refuses what CUDA refuses."""
        return Recordings(self)

    # -- what tests ask of it

    @property
    def replays(self) -> int:
        """Of all recordings."""
        return sum(each.replays for each in self.recorded)

    @property
    def busy(self) -> list[str]:
        """The streams that were made and in which something was done."""
        return [name for name, clock in self._clocks.items() if name not in (HOST, DEFAULT) and clock[name]]

    @contextmanager
    def being(self, module: ModuleType) -> Iterator[None]:
        """Within it, what asks `module`, such as `torch.cpu`, for streams and events gets ours."""
        with (
            patch.object(module, "current_stream", self.current),
            patch.object(module, "stream", self.using),
            patch.object(module, "Stream", lambda priority=0: self.new_stream()),
            patch.object(module, "Event", lambda **_options: self.new_event()),
        ):
            yield

    @contextmanager
    def watching(self, home: Home = "device") -> Iterator[None]:
        """See every operator of this thread, which computes on the device, or on the host."""
        with self._lock:
            self._local.home = home
        with _Functions(self), _Operators(self):
            yield

    @property
    def streams(self) -> list[str]:
        """All that were made, and the host, by name."""
        return list(self._clocks)

    # -- clocks

    @property
    def entered(self) -> list[SimulatedStream]:
        """The streams that this thread has entered."""
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        found: list[SimulatedStream] = self._local.entered
        return found

    def clock_of(self, stream: str) -> Clock:
        """What work enqueued in `stream` now knows of."""
        with self._lock:
            clock = self._clocks[stream]
            _join(clock, self._clocks[HOST])
            return dict(clock)

    def learn(self, call: str, actor: str, clock: Clock) -> None:
        """From now on `actor` comes after what `clock` knows of."""
        self._refuse_in_a_graph()
        with self._lock:
            if call not in self._deaf:
                _join(self._clocks[actor], clock)

    def _refuse_in_a_graph(self) -> None:
        if self.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def has_passed(self, clock: Clock) -> bool:
        """Whether the host has waited for all that `clock` knows of, which is something."""
        with self._lock:
            host = self._clocks[HOST]
            return bool(clock) and all(host.get(actor, 0) >= time_ for actor, time_ in clock.items())

    def promise(self, result: Tensor) -> None:
        """A future is set: its reader comes after what is in the current stream."""
        with self._lock:
            stream = self._default if "set_result" in self._deaf else self.current()
            self._promised[self._number(result)] = self.clock_of(stream.name)

    # -- operators

    def operate(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], waits: bool) -> None:
        """An operator of this thread: who does it, and does it race?"""
        with self._lock:
            self.operators += 1
            touched = [(each, False) for each in reads] + [(each, True) for each in writes]
            spans = [(_span(self._number(each), each), write) for each, write in touched if each.numel()]
            actor = self._actor(what, [number for (number, _, _), _ in spans])
            clock = self._clocks[actor]
            if actor != HOST:
                _join(clock, self._clocks[HOST])
            if actor == DEFAULT:
                for (number, _, _), _ in spans:
                    _join(clock, self._promised.pop(number, {}))
            clock[actor] += 1
            for span, write in spans:
                self._touch(span, write, actor, what)
            if waits and spans and actor != HOST:  # of no elements there is nothing to wait for
                self.waited.append(what)
                _join(self._clocks[HOST], clock)

    def brought(self, tensor: Tensor) -> Tensor:
        """What `Tensor.cpu` returns: of the device's memory a copy, for which the host waits."""
        number = self._number(tensor)
        if not self._on_device.get(number, False):
            return tensor
        self.operate("cpu", [tensor], [], waits=True)
        with _disable_current_modes():
            copy = tensor.clone()
        self._on_device[self._number(copy)] = False
        return copy

    def _actor(self, what: str, numbers: Sequence[int]) -> str:
        """The stream that was entered; else by the memory, and where nothing is known, by the thread.

        What touches memory of the host alone is the host's, whatever stream is current.
        """
        known = {self._on_device[number] for number in numbers if number in self._on_device}
        if self.entered and not all(self._on_device.get(number) is False for number in numbers):
            for number in numbers:
                self._on_device.setdefault(number, True)
            return self.entered[-1].name
        is_device = self._local.home == "device" if not known else known != {False}
        if len(known) == 2:
            self.races.append(f"{what} mixes memory of the host with the device's")
        if is_device and what.startswith("c10d::") and self._local.home == "host":
            self.races.append(f"{what} sends memory of the device")
        for number in numbers:
            self._on_device.setdefault(number, is_device)
        return DEFAULT if is_device else HOST

    def _touch(self, span: Span, write: bool, actor: str, what: str) -> None:
        number, begin, end = span
        clock = self._clocks[actor]
        kept = []
        for old in self._accesses.get(number, []):
            overlaps = old.begin < end and begin < old.end
            if overlaps and (write or old.writes) and clock.get(old.actor, 0) < old.time:
                self.races.append(
                    f"{what} on the {actor} against {old.what} on the {old.actor}: bytes "
                    f"[{max(begin, old.begin)}, {min(end, old.end)}) of storage {number}"
                )
            covered = begin <= old.begin and old.end <= end
            if not (covered and (write or (not old.writes and old.actor == actor))):
                kept.append(old)
        kept.append(Access(begin, end, write, actor, clock[actor], what))
        self._accesses[number] = kept

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number = int(storage._cdata)
        with self._lock:
            if number not in self._accesses:
                self._accesses[number] = []
                self._kept.append(storage)
        return number


class Near(Simulated):
    """A simulated device whose tensors may be made here: they say that they are on the CPU, as they are."""

    where = torch.device("cpu")


def _join(clock: Clock, other: Clock) -> None:
    for actor, time_ in other.items():
        clock[actor] = max(clock.get(actor, 0), time_)


def _span(number: int, tensor: Tensor) -> Span:
    """From the first element to the last; the gaps of a tensor with strides count as its own."""
    begin = tensor.storage_offset() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return number, begin, begin + (last + 1) * tensor.itemsize


@dataclass
class _Operators(TorchDispatchMode):
    device: Simulated
    _seen: None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does to the local tensors comes here in turn
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        name = operator._schema.name
        if not operator.is_view and not name.startswith("aten::empty"):
            reads, writes = [], []
            for number, argument in enumerate(operator._schema.arguments):
                value = kwargs.get(argument.name, args[number] if number < len(args) else None)
                tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                (writes if is_written else reads).extend(tensors)
            fresh = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            aliases = {each.untyped_storage()._cdata for each in [*reads, *writes]}
            made = [each for each in fresh if each.untyped_storage()._cdata not in aliases]
            self.device.operate(name, reads, writes + made, name in SYNCING)
        return result


class _Functions(TorchFunctionMode):
    """Of what is no operator: `tolist` reads on the host, and what `numpy` is asked for may write, too.

    In a stream, `numpy` is asked by a kernel for the CPU, which stands for one of the device: the host does
    not wait for it.
    """

    def __init__(self, device: Simulated) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.cpu:
            return self._device.brought(args[0])
        if function in (Tensor.numpy, Tensor.tolist):
            is_kernel = function is Tensor.numpy
            waits = not (is_kernel and self._device.entered)
            written = [args[0]] if is_kernel else []
            self._device.operate(function.__name__, [args[0]], written, waits)
        return function(*args, **(kwargs or {}))
