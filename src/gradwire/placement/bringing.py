"""How gradients get to where the engine reads them, and how means get back.

Two kinds: the engine works on the gradients where they are (`InPlace`), or on copies on the host (`Copies`).
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from gradwire.errors import GradwireError
from gradwire.placement.device import Device, Event, Stream

CAPTURED = (
    "the backward pass is being captured into a graph, in which gradients cannot travel: a graph replays the "
    "same launches, while steps differ in number, seed and plan. Capture the forward pass alone, or train "
    "without graphs"
)


class Brought(Protocol):
    """A tensor of the model, and where the engine finds it."""

    @property
    def buffer(self) -> Tensor:
        """What the engine reads, once it is `ready`, and fills with what is to land."""

    def ready(self) -> None:
        """Block until `buffer` may be read; on the engine's thread. Raises what went wrong on the way."""

    def land(self) -> None:
        """Carry what `buffer` holds back into the tensor. Returns when that is enqueued; once per step."""


class Bringing(Protocol):
    """Of one attached model. `bring` is called on the thread that computes, the rest on any."""

    def bring(self, key: Hashable, source: Tensor) -> Brought:
        """Start to bring `source`, as the current stream leaves it. A key names one tensor in every step.

        Raises nothing: peers wait for the step, which has to fail by its verdict. See `Brought.ready`.
        """

    def read(self, source: Tensor) -> Tensor:
        """`source` where the engine can read it, as it was when gradients were last brought. May wait."""

    def give(self, value: Tensor, where: torch.device) -> Tensor:
        """`value`, from where the engine reads, at `where`, in the current stream. Between steps."""

    def landing(self) -> AbstractContextManager[None]:
        """Within it, the stream is current in which tensors land: futures of the device are set there."""

    def join(self) -> None:
        """Let the stream that is current on this thread see all that has landed so far."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory in use."""

    def copied_s(self) -> float:
        """Seconds that the copies of the last step took on the device; between steps. May wait for them."""


@dataclass(frozen=True)
class There:
    """A tensor that the engine reads where it is."""

    buffer: Tensor

    def ready(self) -> None:
        pass

    def land(self) -> None:
        pass


class InPlace:
    """Nothing is copied: the engine computes where the model does, and work there is done on return."""

    pinned_bytes = 0

    def bring(self, _key: Hashable, source: Tensor) -> Brought:
        """See `Bringing.bring`."""
        return There(source)

    def read(self, source: Tensor) -> Tensor:
        """See `Bringing.read`."""
        return source

    def give(self, value: Tensor, where: torch.device) -> Tensor:
        """See `Bringing.give`."""
        return value

    def landing(self) -> AbstractContextManager[None]:
        """See `Bringing.landing`."""
        return nullcontext()

    def join(self) -> None:
        """See `Bringing.join`."""

    def copied_s(self) -> float:
        """See `Bringing.copied_s`."""
        return 0.0


Way: TypeAlias = Literal["out", "in"]
"""Out of the device, or into it."""


class _Room:
    """Pinned memory for one tensor, and the ends of the copies out of and into the device."""

    def __init__(self, source: Tensor, device: Device) -> None:
        self.memory = device.pinned(source)
        self.ends: dict[Way, tuple[Event, Event]] = {}
        """Of the last copy each way, if there has been one."""
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
class _Copy:
    """A tensor of the device, and its copy on the host."""

    source: Tensor
    room: _Room
    stream: Stream

    @property
    def buffer(self) -> Tensor:
        return self.room.memory

    def ready(self) -> None:
        self.room.ends["out"][1].synchronize()

    def land(self) -> None:
        self.room.copy("in", self.source, self.buffer, self.stream)


@dataclass(frozen=True)
class Lost:
    """A tensor that could not be copied. The engine hears why, and fails the step on all ranks."""

    buffer: Tensor
    error: BaseException

    def ready(self) -> None:
        raise self.error

    def land(self) -> None:
        """The step has failed, and nothing can be enqueued: the tensor stays as it was."""


class Copies:
    """To pinned memory on the host and back, on a stream of their own, beside the computation.

    One stream for both ways: so a copy out overwrites pinned memory only after the copy in of the step before
    has read it.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, device.new_stream()
        self._rooms: dict[Hashable, _Room] = {}

    def bring(self, key: Hashable, source: Tensor) -> Brought:
        """See `Bringing.bring`."""
        try:
            if self._device.is_capturing():
                raise GradwireError(CAPTURED)
            room = self._room(key, source)
            self._stream.wait_event(self._device.current().record_event())
            room.copy("out", room.memory, source, self._stream)
        except BaseException as error:  # no memory left to pin, for instance
            return Lost(torch.zeros(source.shape, dtype=source.dtype, device="cpu"), error)
        return _Copy(source, room, self._stream)

    def read(self, source: Tensor) -> Tensor:
        """See `Bringing.read`: a copy, in pinned memory that is not kept."""
        copy = self._device.pinned(source)
        with self._device.using(self._stream):
            copy.copy_(source, non_blocking=True)
        self._stream.record_event().synchronize()
        return copy

    def give(self, value: Tensor, where: torch.device) -> Tensor:
        """See `Bringing.give`."""
        there = torch.empty_like(value, device=where)
        with self._device.using(self._device.current()):
            return there.copy_(value)

    def landing(self) -> AbstractContextManager[None]:
        """See `Bringing.landing`."""
        return self._device.using(self._stream)

    def join(self) -> None:
        """See `Bringing.join`."""
        self._device.current().wait_event(self._stream.record_event())

    def _room(self, key: Hashable, source: Tensor) -> _Room:
        room = self._rooms.get(key)
        if room is None or not room.suits(source):
            if room is not None:
                self._rooms.clear()  # buckets have been built anew, others than this one too
            room = self._rooms[key] = _Room(source, self._device)
        return room

    @property
    def pinned_bytes(self) -> int:
        """See `Bringing.pinned_bytes`."""
        return sum(room.memory.nbytes for room in self._rooms.values())

    def copied_s(self) -> float:
        """See `Bringing.copied_s`."""
        return sum(_lasted_s(*ends) for room in self._rooms.values() for ends in room.ends.values())


def _lasted_s(start: Event, stop: Event) -> float:
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3
