"""Gradients, memory and codecs on a device, bytes by way of the host: for a transport that reads its memory.

A payload is copied to pinned memory, travels, and what comes is copied back. The engine's thread works on a
stream of its own, beside the computation, and waits there for what it hands to the transport.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Pending, Round
from gradwire.placement.device import Device, Event
from gradwire.placement.transfer import FailedTransfer, InPlaceBuffer, TransferredBuffer


class StagedComm(Comm):
    """`Comm` for tensors of a device over one for tensors of the CPU: the same verbs, sizes and order."""

    def __init__(self, comm: Comm, device: Device) -> None:
        self.rank, self.world, self.verifies = comm.rank, comm.world, comm.verifies
        self.connections = comm.connections
        self._comm, self._device = comm, device

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Copy `tensor` to the host, wait until the current stream has done so, and issue."""
        sent = self._device.pinned(tensor)
        sent.copy_(tensor, non_blocking=True)
        received = sent if out is tensor else self._device.pinned(out)
        self._device.current().record_event().synchronize()
        return _Staged(self._comm.issue(round_, sent, received), received, out)


class _Staged:
    """The payload comes in pinned memory; the thread that waits copies it on, once, in its own stream."""

    def __init__(self, inner: Pending, received: Tensor, out: Tensor) -> None:
        self._inner, self._received, self._out = inner, received, out
        self._has_landed = False
        self.then = inner.then

    def wait(self) -> None:
        """Block until the collective has ended; the current stream then waits for the copy."""
        self._inner.wait()
        if not self._has_landed:
            self._has_landed = True
            self._out.copy_(self._received, non_blocking=True)


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
