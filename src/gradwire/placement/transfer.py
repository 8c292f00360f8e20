"""Brings gradients to the memory that the engine reads, and means back to the model.

The engine works on the gradients in place (`InPlaceTransfer`), or on copies on the host (`CopyTransfer`).
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from gradwire.placement.device import Device, Event, Stream


class Waited(NamedTuple):
    """How it went to wait for something."""

    at_s: float
    """When that was over, on the clock of `gradwire.measure.clock.now_s`."""
    error: BaseException | None


class TransferredBuffer(Protocol):
    """A tensor of the model, and the memory in which the engine works on it."""

    @property
    def buffer(self) -> Tensor:
        """The engine reads it after `ready`, and writes to it before `copy_back`."""

    def ready(self) -> None:
        """Block the calling thread until `buffer` may be read. Raises if the copy failed."""

    def copy_back(self) -> None:
        """Copy `buffer` back into the tensor, once per step. Returns when the copy is enqueued."""


class BufferTransfer(Protocol):
    """For one attached model. `start` is called on the thread that computes, the rest on any thread."""

    def start(self, key: Hashable, source: Tensor) -> TransferredBuffer:
        """Start to transfer `source` as it is after the work enqueued in the current stream.

        `key` names the same tensor in every step. Raises nothing: peers wait for the step, which has to fail
        by its verdict, so an error is raised by `TransferredBuffer.ready`.
        """

    def read(self, source: Tensor) -> Tensor:
        """`source`, readable by the engine, as it was when gradients were last brought. May wait."""

    def copy_to(self, value: Tensor, where: torch.device) -> Tensor:
        """The engine's `value` on the device `where`, in order with the current stream. Between steps."""

    def landing(self) -> AbstractContextManager[None]:
        """A context in which the stream of the landing copies is current, to set the device's futures."""

    def working(self) -> AbstractContextManager[None]:
        """A context in which the stream is current that the engine works in, if it needs one."""

    def follow(self) -> None:
        """Make the engine's stream wait for all that this thread's current stream has so far."""

    def join(self) -> None:
        """Make this thread's current stream wait for all that the engine has enqueued so far."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory in use, as torch takes them from the system."""

    def copied_s(self) -> float:
        """Seconds that the device spent on the last step's copies. Between steps; may wait for them."""


@dataclass(frozen=True)
class InPlaceBuffer:
    """A tensor that the engine works on in place."""

    buffer: Tensor

    def ready(self) -> None:
        pass

    def copy_back(self) -> None:
        pass


class InPlaceTransfer:
    """Nothing is copied: the engine works on the model's own device, whose calls return when work is done."""

    pinned_bytes = 0

    def start(self, _key: Hashable, source: Tensor) -> TransferredBuffer:
        return InPlaceBuffer(source)

    def read(self, source: Tensor) -> Tensor:
        return source

    def copy_to(self, value: Tensor, where: torch.device) -> Tensor:
        return value

    def landing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def follow(self) -> None:
        pass

    def join(self) -> None:
        pass

    def copied_s(self) -> float:
        return 0.0


@dataclass(frozen=True)
class FailedTransfer:
    """A tensor that could not be copied. `ready` raises why, which fails the step on all ranks."""

    buffer: Tensor
    error: BaseException

    def ready(self) -> None:
        raise self.error

    def copy_back(self) -> None:
        """The step has failed, and nothing can be enqueued: the tensor stays as it was."""


@dataclass(frozen=True)
class _AwaitedBuffer:
    """A tensor that the engine works on in place once the device has come to an event."""

    buffer: Tensor
    event: Event

    def ready(self) -> None:
        self.event.synchronize()

    def copy_back(self) -> None:
        pass


class StreamTransfer:
    """The engine works on the gradients where they are, in a stream of its own. See `BufferTransfer`."""

    pinned_bytes = 0

    def __init__(self, device: Device, *, follows: bool = True) -> None:
        """Whether the engine's stream `follows` the one that computes at once, as where one thread enqueues
        for both. Else the host waits before it enqueues for the engine. The thread that computes runs far
        ahead of the device, so the engine's stream would otherwise wait for gradients that come later."""
        self._device, self._stream, self._follows = device, device.new_stream(), follows

    def start(self, _key: Hashable, source: Tensor) -> TransferredBuffer:
        """Nothing is copied."""
        try:
            if not self._follows:
                return _AwaitedBuffer(source, self._device.current().record_event())
            self.follow()
        except BaseException as error:
            return FailedTransfer(source, error)
        return InPlaceBuffer(source)

    def read(self, source: Tensor) -> Tensor:
        return source

    def copy_to(self, value: Tensor, where: torch.device) -> Tensor:
        return value

    def landing(self) -> AbstractContextManager[None]:
        return self._device.using(self._stream)

    def working(self) -> AbstractContextManager[None]:
        return self.landing()

    def follow(self) -> None:
        self._stream.wait_event(self._device.current().record_event())

    def join(self) -> None:
        self._device.current().wait_event(self._stream.record_event())

    def copied_s(self) -> float:
        """0 s: nothing is copied here. The time of a collective includes the copies of `StagedComm`."""
        return 0.0


Way: TypeAlias = Literal["out", "in"]
"""Out of the device, or into it."""


class _PinnedBuffer:
    """Pinned memory for one tensor, and the events around its copies out of and into the device."""

    def __init__(self, source: Tensor, device: Device) -> None:
        self.memory = device.pinned(source)
        self.ends: dict[Way, tuple[Event, Event]] = {}
        """Start and stop of the last copy in each direction, if there has been one."""
        self._device = device

    def suits(self, source: Tensor) -> bool:
        return self.memory.shape == source.shape and self.memory.dtype == source.dtype

    def copy(self, way: Way, to: Tensor, source: Tensor, stream: Stream) -> None:
        start, stop = self.ends.get(way) or (self._device.new_event(), self._device.new_event())
        with self._device.using(stream):
            stream.record_event(start)
            to.copy_(source, non_blocking=True)
            stream.record_event(stop)
        self.ends[way] = start, stop


@dataclass(frozen=True)
class _CopiedBuffer:
    """A tensor of the device, and its copy on the host."""

    source: Tensor
    pinned: _PinnedBuffer
    stream: Stream

    @property
    def buffer(self) -> Tensor:
        return self.pinned.memory

    def ready(self) -> None:
        self.pinned.ends["out"][1].synchronize()

    def copy_back(self) -> None:
        self.pinned.copy("in", self.source, self.buffer, self.stream)


class CopyTransfer:
    """Copies to pinned memory on the host and back, in a stream of their own, beside the computation.

    Both directions share one stream, so a copy out overwrites pinned memory only after the previous step's
    copy in has read it.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, device.new_stream()
        self._pinned: dict[Hashable, _PinnedBuffer] = {}

    def start(self, key: Hashable, source: Tensor) -> TransferredBuffer:
        try:
            pinned = self._pinned_for(key, source)
            self.follow()
            pinned.copy("out", pinned.memory, source, self._stream)
        except BaseException as error:  # no memory left to pin, for instance
            return FailedTransfer(torch.zeros(source.shape, dtype=source.dtype, device="cpu"), error)
        return _CopiedBuffer(source, pinned, self._stream)

    def read(self, source: Tensor) -> Tensor:
        """A copy in pinned memory, which is not kept."""
        copy = self._device.pinned(source)
        with self._device.using(self._stream):
            copy.copy_(source, non_blocking=True)
        self._stream.record_event().synchronize()
        return copy

    def copy_to(self, value: Tensor, where: torch.device) -> Tensor:
        there = torch.empty_like(value, device=where)
        with self._device.using(self._device.current()):
            return there.copy_(value)

    def landing(self) -> AbstractContextManager[None]:
        return self._device.using(self._stream)

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def follow(self) -> None:
        self._stream.wait_event(self._device.current().record_event())

    def join(self) -> None:
        self._device.current().wait_event(self._stream.record_event())

    def _pinned_for(self, key: Hashable, source: Tensor) -> _PinnedBuffer:
        pinned = self._pinned.get(key)
        if pinned is None or not pinned.suits(source):
            if pinned is not None:
                self._pinned.clear()  # buckets have been rebuilt, so the other shapes changed too
            pinned = self._pinned[key] = _PinnedBuffer(source, self._device)
        return pinned

    @property
    def pinned_bytes(self) -> int:
        return sum(_taken_bytes(pinned.memory.nbytes) for pinned in self._pinned.values())

    def copied_s(self) -> float:
        return sum(_lasted_s(*ends) for pinned in self._pinned.values() for ends in pinned.ends.values())


def _taken_bytes(nbytes: int) -> int:
    """As many as `ATen/core/CachingHostAllocator.h` takes by default: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _lasted_s(start: Event, stop: Event) -> float:
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3
