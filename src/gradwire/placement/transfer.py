"""Brings gradients to the memory that the reducer reads, and means back to the model.

The reducer works on the gradients in place, on the CPU (`BufferTransfer`) or in a stream of a device
(`StreamTransfer`), or on copies on the host (`CopyTransfer`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.placement.device import Device, Stream, StreamEvent


class Waited(NamedTuple):
    """Result of a wait."""

    at_s: float
    """Time at which the wait ended, on the clock of `gradwire.measure.clock.now_s`."""
    error: BaseException | None


def _nothing() -> None:
    """Do nothing: there is nothing to wait for, or to copy."""


class TransferredBuffer:
    """One flat tensor of the model during one step, and the memory `buffer` in which the reducer works on it.

    In this class `buffer` is the tensor itself, so copying back does nothing. Subclasses work on a copy. The
    reducer reads `buffer` after `ready` has returned.
    """

    def __init__(self, buffer: Tensor, wait: Callable[[], None] = _nothing) -> None:
        """`wait` returns when `buffer` may be read, or raises."""
        self.buffer, self._wait = buffer, wait

    def ready(self) -> None:
        """Block the calling thread until `buffer` may be read. Raises if the copy failed."""
        self._wait()

    def copy_back_early(self, begin: int, end: int) -> None:
        """Copy elements [begin, end) of `buffer` back, which are final, while others are still to come.

        Returns when the copy is enqueued. The reducer may not write these elements any more.
        """

    def copy_back(self) -> None:
        """Copy the remaining elements back, at the end of the step. Returns when the copy is enqueued."""

    def poison(self) -> None:
        """Fill the model's tensor with NaN; elements that were copied back before are overwritten."""
        self.buffer.fill_(torch.nan)


def _failed(buffer: Tensor, error: BaseException) -> TransferredBuffer:
    """Buffer whose transfer failed with `error`: `ready` raises it. The status vote then fails the step."""

    def wait() -> None:
        raise error

    return TransferredBuffer(buffer, wait)


class BufferTransfer:
    """Carrier of one attached model's gradients to the reducer, and of means back. This one leaves them in
    place.

    It is for a CPU, whose calls return when work is done. `start` is called on the thread that computes, the
    other methods on any thread.
    """

    def start(self, key: Hashable, source: Tensor) -> TransferredBuffer:
        """Start to transfer `source` as it is after the work enqueued in the current stream.

        `key` names the same tensor in every step. Raises nothing: peers wait for the step, which has to fail
        by its status vote, so an error is raised by `TransferredBuffer.ready`.
        """
        return TransferredBuffer(source)

    def read(self, source: Tensor) -> Tensor:
        """`source` as the reducer can read it, with its values at the last `start`. May block."""
        return source

    def reading(self) -> AbstractContextManager[None]:
        """A context in which the stream of `read`'s copies is current; tensors for `read` are made in it."""
        return self.landing()

    def copy_to(self, value: Tensor, where: torch.device) -> Tensor:
        """The reducer's `value` on the device `where`, in order with the current stream. Between steps."""
        return value

    def landing(self) -> AbstractContextManager[None]:
        """A context in which the stream of the landing copies is current, to set the device's futures."""
        return nullcontext()

    def working(self) -> AbstractContextManager[None]:
        """Context in which the reducer's stream is current, if it needs one."""
        return nullcontext()

    def follow(self) -> None:
        """Make the reducer's stream wait for all work in this thread's current stream so far."""

    def join(self) -> None:
        """Make this thread's current stream wait for everything that the reducer has enqueued so far."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory in use, as torch takes them from the system."""
        return 0

    def copied_s(self) -> float:
        """Seconds that the device spent on the last step's copies. Between steps; may wait for them.

        The time of a collective includes the copies of `StagedComm`, which do not count here.
        """
        return 0.0


class StreamTransfer(BufferTransfer):
    """Transfer in place: the reducer works on the gradients on their device, in a stream of its own, beside
    the computation.
    """

    def __init__(self, device: Device, *, follows: bool = True) -> None:
        """`follows` is True if the reducer's stream waits for the computing stream, as where one thread
        enqueues for both.

        Otherwise the host waits before it enqueues for the reducer. The thread that computes runs far ahead
        of the device, so the reducer's stream would else wait for gradients that come later.
        """
        self._device, self._stream, self._follows = device, device.new_stream(), follows

    def start(self, key: Hashable, source: Tensor) -> TransferredBuffer:
        """Take `source` in place; nothing is copied."""
        try:
            if not self._follows:
                return TransferredBuffer(source, self._device.awaited(self._device.current()).synchronize)
            self.follow()
        except BaseException as error:
            return _failed(source, error)
        return TransferredBuffer(source)

    def landing(self) -> AbstractContextManager[None]:
        return self._device.using(self._stream)

    working = landing

    def follow(self) -> None:
        self._stream.wait_event(self._device.current().record_event())

    def join(self) -> None:
        self._device.current().wait_event(self._stream.record_event())


class _PinnedBuffer:
    """Pinned memory for one tensor, and the events around its copies in the last step, both ways."""

    def __init__(self, source: Tensor, device: Device) -> None:
        self.memory = device.pinned(source)
        self.last: StreamEvent | None = None
        """When the last copy is done."""
        self._device = device
        self._events: list[tuple[StreamEvent, StreamEvent]] = []
        """Start and stop of each copy of the last step, and spare ones."""
        self._copies = 0

    def suits(self, source: Tensor) -> bool:
        return self.memory.shape == source.shape and self.memory.dtype == source.dtype

    def begin(self) -> None:
        """Begin a step, which reuses the events of the step before."""
        self._copies = 0

    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy of `source` to `to` in `stream`, between the device's tensor and the pinned memory,
        and record its duration.
        """
        if self._copies == len(self._events):
            self._events.append((self._device.new_event(), self._device.new_event()))
        start, stop = self._events[self._copies]
        self._copies += 1
        with self._device.using(stream):
            stream.record_event(start)
            to.copy_(source, non_blocking=True)
            stream.record_event(stop)
        self.last = stop

    def copied_s(self) -> float:
        return sum(_lasted_s(*each) for each in self._events[: self._copies])


class _CopiedBuffer(TransferredBuffer):
    """A tensor on a device, of which the reducer has a copy in pinned memory."""

    def __init__(
        self, source: Tensor, pinned: _PinnedBuffer, wait: Callable[[], None], device: Device, stream: Stream
    ) -> None:
        """`source` is the tensor on the device, and `pinned` the memory into which it is copied. `wait`
        returns when the copy is complete; `stream` is for copies into the device.
        """
        super().__init__(pinned.memory, wait)
        self._source, self._pinned, self._device, self._stream = source, pinned, device, stream
        self._copied: list[tuple[int, int]] = []

    def copy_back_early(self, begin: int, end: int) -> None:
        self._copied.append((begin, end))
        self._pinned.copy(self._source[begin:end], self.buffer[begin:end], self._stream)

    def copy_back(self) -> None:
        """Copy back the stretches that have not been copied early."""
        numel, done = self.buffer.numel(), 0
        for begin, end in (*sorted(self._copied), (numel, numel)):
            if begin > done:
                self.copy_back_early(done, begin)
            done = end

    def poison(self) -> None:
        """Write NaN on the device, after the copies so far: the host may not overwrite memory that a copy may
        still read.
        """
        self._copied = [(0, self.buffer.numel())]
        with self._device.using(self._stream):
            self._source.fill_(torch.nan)


class CopyTransfer(StreamTransfer):
    """Transfer by copies to pinned memory on the host and back, in two streams, beside the computation.

    The reducer works on the host, in no stream. The computing thread runs far ahead of the device, and
    enqueues all copies to the host early in the backward pass. In one stream, a mean would be copied back
    only after the last of these. So copies back have a second stream, which waits for no other one.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._out = device.new_stream()
        self._pinned: dict[Hashable, _PinnedBuffer] = {}

    def start(self, key: Hashable, source: Tensor) -> TransferredBuffer:
        """Start to copy `source` to pinned memory on the host, in a stream of its own. `key` is as in
        `BufferTransfer.start`.

        Returns at once. An error, such as no memory left to pin, is raised by `TransferredBuffer.ready`.
        """
        try:
            pinned = self._pinned_for(key, source)
            pinned.begin()
            self.follow()
            if pinned.last is not None:  # the mean of the step before is still being read, perhaps
                self._out.wait_event(pinned.last)
            pinned.copy(pinned.memory, source, self._out)
            copied = self._device.awaited(self._out)
        except BaseException as error:  # no memory left to pin, for instance
            return _failed(torch.zeros(source.shape, dtype=source.dtype, device="cpu"), error)
        return _CopiedBuffer(source, pinned, copied.synchronize, self._device, self._stream)

    def follow(self) -> None:
        self._out.wait_event(self._device.current().record_event())

    def read(self, source: Tensor) -> Tensor:
        """`source` copied to new pinned memory on the host. Blocks until the copy is complete."""
        copy = self._device.pinned(source)
        with self._device.using(self._out):
            copy.copy_(source, non_blocking=True)
        self._device.awaited(self._out).synchronize()
        return copy

    def reading(self) -> AbstractContextManager[None]:
        return self._device.using(self._out)

    def copy_to(self, value: Tensor, where: torch.device) -> Tensor:
        there = torch.empty_like(value, device=where)
        with self._device.using(self._device.current()):
            return there.copy_(value)

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

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
        return sum(pinned.copied_s() for pinned in self._pinned.values())


def _taken_bytes(nbytes: int) -> int:
    """Bytes that torch's `ATen/core/CachingHostAllocator.h` takes by default for `nbytes`: the next power of
    two.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _lasted_s(start: StreamEvent, stop: StreamEvent) -> float:
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3
