"""Comms for transports that cannot carry the memory's tensors directly: in streams, or from another place.

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
    """`Comm` whose collectives are enqueued in a stream: waiting for one makes the current stream wait, not
    the host.

    The host is not told of a collective's end, so no time can be read from it. Work that a callback enqueues
    comes after the collective, because the callback waits for it first.

    Sums and broadcasts use the library's algorithms: for our own hops the host would wait.
    """

    announces = False

    def __init__(self, comm: Comm) -> None:
        self.rank, self.world, self._comm = comm.rank, comm.world, comm

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Enqueue the collective by the library's own algorithm; the host does not wait."""
        asked = round_ if round_.algorithm == "library" else replace(round_, algorithm="library")
        pending = self._comm.issue(asked, tensor, out)
        return pending if isinstance(pending, Unannounced) else Unannounced(pending)


class StagedComm(Comm):
    """`Comm` for tensors in another place than its transport's, by copies there and back: equal verbs and
    order.

    `room` allocates a tensor there like another one, and `ready` returns once the copy may be sent. The
    waiting thread copies the results back, in its own stream, and waits for that copy if the results are on
    the host.
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
        """Copy `tensor` to the transport's place, and issue once the copy is done."""
        # A device copies to and from pinned memory in a stream; for memory that is not pinned the host waits.
        in_stream, sent = not tensor.is_cpu, self._room(tensor)
        sent.copy_(tensor, non_blocking=in_stream)
        received = sent if out is tensor else self._room(out)
        self._ready()

        def copied_back() -> None:
            out.copy_(received, non_blocking=in_stream)

        return Finishing(self._comm.issue(round_, sent, received), copied_back)


def by_the_host(comm: Comm, device: Device) -> Comm:
    """Wrap `comm`, which reads the host's memory, for tensors of a `device`: payloads go through pinned
    memory.

    The worker's thread waits for each copy, in its stream, before it hands it to the transport.
    """

    def ready() -> None:
        device.awaited(device.current()).synchronize()

    return StagedComm(comm, device.pinned, ready)


def through_a_device(comm: Comm, where: torch.device) -> Comm:
    """Wrap `comm`, whose collectives are work in a stream for tensors at `where`, for tensors on the CPU.

    The host waits for each collective.
    """
    return StagedComm(StreamComm(comm), partial(torch.empty_like, device=where))
