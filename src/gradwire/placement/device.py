"""The operations of a device that runs work in streams: order, pinned memory, and futures that know streams.

A *stream* is a queue of work that runs in order. Work on two streams is ordered only by an *event*: one
stream records it, the other waits for it. The host enqueues work and goes on; only `synchronize` makes it
wait. Work that was enqueued on any stream starts after all that the host did before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast
from weakref import ref

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.kernels.graphs import Graphs


class StreamEvent(Protocol):
    """A point in a stream. `torch.Event` has these methods."""

    def synchronize(self) -> None:
        """Make the host wait until the work before the point is done."""

    def elapsed_time(self, other: Any, /) -> float:
        """Milliseconds from this point to `other`, where both have passed and both take times."""


class Stream(Protocol):
    """A queue of work. `torch.Stream` has these methods."""

    def record_event(self, event: Any = None, /) -> Any:
        """Record `event`, or a new one that takes no time, after the work enqueued so far; returns it."""

    def wait_event(self, event: Any, /) -> None:
        """Let work that is enqueued from now on start after the point that `event` was recorded at."""


class Device(Protocol):
    """The device that computes the gradients."""

    @property
    def where(self) -> torch.device:
        """The device of its tensors."""

    @property
    def is_host(self) -> bool:
        """True for the CPU: its work is done when a call returns, and nothing has to be copied."""

    def current(self) -> Stream:
        """Stream to which this thread's operators go."""

    def new_stream(self) -> Stream:
        """Make another stream."""

    def using(self, stream: Any) -> AbstractContextManager[None]:
        """Context in which this thread's operators go to `stream`. Several threads may use one stream
        at a time.
        """

    def stay(self) -> None:
        """Make this the current device of the thread, for good: each of our own threads calls it first."""

    def new_event(self) -> StreamEvent:
        """An event that takes times, to be recorded again and again."""

    def awaited(self, stream: Any) -> StreamEvent:
        """Record an event after the work enqueued in `stream` so far. A thread that waits for it sleeps; for
        other events it may spin.
        """

    def pinned(self, like: Tensor) -> Tensor:
        """Uninitialised memory on the host that copies reach directly: shape, strides and type of `like`."""

    def new_future(self) -> Future[Tensor]:
        """Make a stream-aware future for a tensor of this device.

        It is set while the stream that fills the tensor is current. Waiting for it makes the caller's stream
        wait for that stream; the host goes on.
        """

    def is_capturing(self) -> bool:
        """True if this thread's work is recorded into a graph instead of being run."""

    def graphs(self) -> Graphs | None:
        """Maker of graphs; `None` if this device records none."""


class _Nothing:
    """Stream and event of a device whose work is done when a call returns."""

    def record_event(self, event: Any = None, /) -> Any:
        return event or self

    def wait_event(self, event: Any, /) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any, /) -> float:
        return 0.0


_NOTHING = _Nothing()


class HostDevice:
    """The CPU: nothing has to be waited for. See `Device` for the methods."""

    where = torch.device("cpu")
    is_host = True

    def current(self) -> Stream:
        return _NOTHING

    def new_stream(self) -> Stream:
        return _NOTHING

    def using(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def stay(self) -> None:
        pass

    def new_event(self) -> StreamEvent:
        return _NOTHING

    def awaited(self, stream: Any) -> StreamEvent:
        return _NOTHING

    def pinned(self, like: Tensor) -> Tensor:
        """Plain memory: nothing is copied to or from a device."""
        return torch.empty_like(like)

    def new_future(self) -> Future[Tensor]:
        return Future()

    def is_capturing(self) -> bool:
        return False

    def graphs(self) -> None:
        return None


class Accelerator:
    """A device of `torch.accelerator`, such as a GPU. See `Device` for the methods."""

    is_host = False

    def __init__(self, where: torch.device) -> None:
        self.where = where

    def current(self) -> Stream:
        return torch.accelerator.current_stream(self.where)

    def new_stream(self) -> Stream:
        return torch.Stream(self.where)

    def using(self, stream: Any) -> AbstractContextManager[None]:
        """Context for `stream`. A `torch.Stream` as a context manager would serve one thread at a time."""
        return _Using(self.where, stream)

    def stay(self) -> None:
        """A new thread's current device is the first, and recording an event goes back there afterwards."""
        torch.accelerator.set_device_index(self.where)

    def new_event(self) -> StreamEvent:
        return torch.Event(self.where, enable_timing=True)

    def awaited(self, stream: Any) -> StreamEvent:
        """Record an event after the work enqueued in `stream`; see `Device.awaited`.

        On CUDA the event is `torch.cuda.Event`, because `torch.Event` takes `blocking=True` and forgets it
        (torch 2.11). CUDA's own event is recorded in CUDA's own streams only.
        """
        if self.where.type != "cuda":
            return cast(StreamEvent, stream.record_event())
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        same = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
        event.record(torch.cuda.Stream(**same))  # type: ignore[no-untyped-call]
        return event

    def pinned(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def new_future(self) -> Future[Tensor]:
        """Make a future; torch makes such futures only for devices that it was built with."""
        return Future(devices=[self.where])

    def is_capturing(self) -> bool:
        return self.where.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def graphs(self) -> Graphs | None:
        """Makers for CUDA alone: on AMD's GPUs, which pass for CUDA's, it has not been tried."""
        if self.where.type != "cuda" or torch.version.hip is not None:
            return None
        return _CUDAGraphs()


class _CUDAGraphs:
    """See `gradwire.kernels.graphs.Graphs`."""

    def __init__(self) -> None:
        self._pools: tuple[ref[_Pool], ...] = ()

    def __call__(self) -> Callable[[], _CUDAGraph]:
        pool = _Pool(torch.cuda.graph_pool_handle())
        # Another thread may count: so a tuple, which does not change.
        self._pools = (*(each for each in self._pools if each() is not None), ref(pool))
        return partial(_CUDAGraph, pool)

    def memory_bytes(self) -> int:
        pools = {pool.handle for each in self._pools if (pool := each()) is not None}
        segments = torch.cuda.memory_snapshot() if pools else []  # type: ignore[no-untyped-call]
        return sum(each["total_size"] for each in segments if each["segment_pool_id"] in pools)


@dataclass(frozen=True, eq=False)
class _Pool:
    """Memory that graphs share, which keep this."""

    handle: Any


class _CUDAGraph:
    """See `gradwire.kernels.graphs.Graph`. `pool` is the memory that it shares.

    `torch.cuda.graph` would wait for the device, collect garbage and empty torch's caches. This captures in
    the middle of a backward pass, on autograd's thread. Meanwhile other threads, such as NCCL's watchdog, may
    do what is forbidden to this one.
    """

    def __init__(self, pool: _Pool) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool
        self.end: Callable[[], None] = self._graph.capture_end
        self.replay: Callable[[], None] = self._graph.replay

    def begin(self) -> None:
        self._graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")


class _Using:
    """Context in which a `stream` of the device `where` is current, and the device is.

    A stream brings its device with it, so the thread's own device is restored last: by exchange, because
    setting a device that this process has not used, such as the first on most ranks, makes a context there.
    Each bucket enters one. So this is a class, as `contextlib` takes more calls, and calls what
    `torch.accelerator` does.
    """

    __slots__ = ("_before", "_device", "_index", "_stream")

    def __init__(self, where: torch.device, stream: Any) -> None:
        self._index, self._stream = where.index, stream

    def __enter__(self) -> None:
        self._device = torch._C._accelerator_exchangeDevice(self._index)
        self._before = torch._C._accelerator_getStream(self._index)
        torch._C._accelerator_setStream(self._stream)

    def __exit__(self, *error: Any) -> None:
        torch._C._accelerator_setStream(self._before)
        torch._C._accelerator_maybeExchangeDevice(self._device)


def fetch(device: Device, value: Tensor) -> Callable[[], Tensor]:
    """Copy `value`, which is on the `device`, to the host, as the current stream leaves it.

    Returns at once. The function that it returns waits for the copy and returns it.
    """
    copy = device.pinned(value)
    with device.using(stream := device.current()):
        copy.copy_(value, non_blocking=True)
    done = device.awaited(stream)

    def fetched() -> Tensor:
        done.synchronize()
        return copy

    return fetched


def device_at(where: torch.device) -> Device:
    """The device whose tensors are at `where`."""
    return HostDevice() if where.type == "cpu" else Accelerator(where)
