"""Comms of the wires that do not carry tensors as they are: in streams, or from somewhere else.

Memory is on the host or on a device. Bytes travel over gloo, which reads the host's memory, or over NCCL,
whose collectives are work in a stream of the device. Of the four pairs, the host over gloo needs nothing, and
a device over NCCL is a `StreamComm`. The other two are a `StagedComm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Finishing, Pending, Round, Unannounced
from gradwire.placement.device import Device


class StreamComm(Comm):
    """`Comm` over one whose collectives are enqueued: waiting for one puts the current stream after it.

    The host is not told of its end: what a callback enqueues comes after the collective, once it has waited.
    No time can be read from the end either.

    Sums and broadcasts go as the library likes: hops of our own are messages, for which the host waits.
    """

    announces = False

    def __init__(self, comm: Comm) -> None:
        self.rank, self.world, self._comm = comm.rank, comm.world, comm

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Enqueue the collective by the library's own algorithm; the host does not wait."""
        asked = round_ if round_.algorithm == "library" else replace(round_, algorithm="library")
        return Unannounced(self._comm.issue(asked, tensor, out))


class StagedComm(Comm):
    """`Comm` over one for tensors in another place, by copies there and back: the same verbs and order.

    `room` makes a tensor there like another one, and `ready` returns once what was copied may be sent. The
    thread that waits copies what has come, in its own stream, and waits for that itself if it is the host.
    """

    def __init__(
        self, comm: Comm, room: Callable[[Tensor], Tensor], ready: Callable[[], None] = lambda: None
    ) -> None:
        self.rank, self.world, self.verifies = comm.rank, comm.world, comm.verifies
        self.announces, self.connections = comm.announces, comm.connections
        self._comm, self._room, self._ready = comm, room, ready

    @property
    def carrier(self) -> Comm:
        """The carrier of the comm for copies."""
        return self._comm.carrier

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Copy `tensor` there, and issue once that is done."""
        # A device copies to and from pinned memory in a stream; for memory that is not pinned the host waits.
        in_stream, sent = not tensor.is_cpu, self._room(tensor)
        sent.copy_(tensor, non_blocking=in_stream)
        received = sent if out is tensor else self._room(out)
        self._ready()

        def copied_back() -> None:
            out.copy_(received, non_blocking=in_stream)

        return Finishing(self._comm.issue(round_, sent, received), copied_back)


def by_the_host(comm: Comm, device: Device) -> Comm:
    """`comm`, which reads the host's memory, for tensors of a `device`: through pinned memory.

    The engine's thread waits for the copy, in whose stream it works, and then hands it to the transport.
    """

    def ready() -> None:
        device.awaited(device.current()).synchronize()

    return StagedComm(comm, device.pinned, ready)


def through_a_device(comm: Comm, where: torch.device) -> Comm:
    """`comm`, whose collectives are work in a stream for tensors at `where`, for tensors on the CPU.

    The host waits for each of them.
    """
    return StagedComm(StreamComm(comm), partial(torch.empty_like, device=where))
