"""Where an attached model's gradients, memory and bytes may be: what process groups and the user allow."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gradwire.comm import Comm, ProcessGroupComm
from gradwire.comm import groups as lending
from gradwire.configuration import Configuration, Place
from gradwire.engine.agree import require_agreement
from gradwire.engine.worker import Worker
from gradwire.errors import TransportError
from gradwire.placement import Device, Placement, ThroughComm, host, staged, stream

_LOG = logging.getLogger("gradwire")
_NO_GLOO = (
    "%s. So what ranks agree on travels over the model's own backend, for which the host waits in every "
    "step, and gradients cannot be carried on the host"
)
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True)
class Lines:
    """The process groups of one attached model, all over the ranks of its own.

    `everyone` carries tensors on the CPU. `streamed` carries those of the model's device, as work in streams;
    `None` where nothing does, or nothing shall. Where there is no `cpu` group, `everyone` goes through the
    device.
    """

    device: Device
    everyone: Comm
    cpu: ProcessGroupComm | None
    streamed: ProcessGroupComm | None = None

    @property
    def comms(self) -> tuple[ProcessGroupComm, ...]:
        """One for each group."""
        found = {each.group: each for each in (self.cpu, self.streamed) if each is not None}
        return tuple(found.values())

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """At least one."""
        return tuple(each.group for each in self.comms)


def connect(
    asked: Configuration,
    models: dist.ProcessGroup,
    own: dist.ProcessGroup | None,
    device: Device,
    where: torch.device,
) -> Lines:
    """The group over which ranks can agree: the user's `own`, or one like the model's. A collective.

    Where the model's group carries no tensors on the CPU, a gloo group is made beside it. Without that, on
    all ranks, a warning says what is slower, or `TransportError` is raised if nothing else carries what is
    `asked` for.
    """
    if own is not None:
        _check_ranks(own, models)
        if device.is_host or lending.carries_cpu(own):
            return _by_cpu(device, own)
        if not _streams(own, where):
            raise ValueError(
                "process_group carries no tensors on the CPU: create one with "
                "torch.distributed.new_group(backend='gloo'), or leave it out"
            )
    if where.type == "cpu" or lending.carries_cpu(models):
        return _by_cpu(device, lending.borrow(models))
    try:
        return _by_cpu(device, lending.borrow(models, where, "gloo"))
    except TransportError as error:
        if not _streams(models, where):
            raise
        needs_gloo = asked.placement == "host" or asked.checksums
        require_agreement({"needs gloo": str(needs_gloo)}, ThroughComm(ProcessGroupComm(models), where))
        if needs_gloo:
            raise
        if models.rank() == 0:
            _LOG.warning(_NO_GLOO, error)
    streamed = ProcessGroupComm(own or lending.borrow(models, where))
    return Lines(device, ThroughComm(streamed, where), None, streamed)


def can_stream(
    asked: Place, lines: Lines, models: dist.ProcessGroup, own: dist.ProcessGroup | None, where: torch.device
) -> bool:
    """Whether collectives of the device's gradients may be work in its streams."""
    if lines.device.is_host or asked == "host" or lines.cpu is None:
        return False
    return _streams(models if own is None else own, where)


def with_streams(
    asked: Configuration,
    lines: Lines,
    models: dist.ProcessGroup,
    own: dist.ProcessGroup | None,
    where: torch.device,
) -> Lines:
    """`lines` with a group whose collectives are work in streams, where there can be one. A collective.

    Raises `ValueError`, on all ranks, for checksums of what a device sends.
    """
    if not can_stream(asked.placement, lines, models, own, where):
        return lines
    if asked.checksums:
        if asked.placement == "device":
            raise ValueError(
                "checksums=True checks messages that the host sends, but with placement='device' NCCL sends "
                "from the device: leave one of the two out"
            )
        return lines
    if lines.cpu is not None and _streams(lines.cpu.group, where):
        return replace(lines, streamed=lines.cpu)
    return replace(lines, streamed=ProcessGroupComm(lending.borrow(models, where) if own is None else own))


def placements(
    asked: Place, lines: Lines, control: Comm, comm: Comm, worker: Worker, *, flat: bool
) -> tuple[Placement, Placement | None]:
    """The placement of what stays on the device, and the one of what does not.

    On the CPU, `control` is over all ranks, and `comm` between replicas. There is only one placement on the
    CPU, and where "host" is `asked` for.
    """
    device = lines.device
    by_host = host(comm, worker.post, device, control=control)
    if device.is_host or asked == "host":
        return by_host, None
    if not flat:
        why = "ranks share nodes or hold shards, which no other placement carries yet"
        if asked == "device" and control.rank == 0:
            _LOG.warning(
                "gradients are carried on the host, although placement='device' was asked for: %s", why
            )
        return replace(by_host, why=why), None
    if lines.streamed is None:
        return staged(comm, worker.post, device), by_host
    if os.environ.get(_BLOCKING, "0") not in ("", "0") and control.rank == 0:
        _LOG.warning(
            "%s is set: the host waits for each collective of NCCL, so that none of it is hidden behind the "
            "backward pass. Unset it if nothing else needs it",
            _BLOCKING,
        )
    on_device = stream(lines.streamed, control, device, worker.crashed)
    return on_device, None if lines.cpu is None else by_host


def _by_cpu(device: Device, group: dist.ProcessGroup) -> Lines:
    comm = ProcessGroupComm(group)
    return Lines(device, comm, comm)


def _streams(group: dist.ProcessGroup, where: torch.device) -> bool:
    return lending.backend_at(group, where) in lending.STREAMED


def _check_ranks(group: dist.ProcessGroup, models: dist.ProcessGroup) -> None:
    mine, theirs = dist.get_process_group_ranks(group), dist.get_process_group_ranks(models)
    if mine != theirs:
        raise ValueError(f"process_group has ranks {mine}, the model's has {theirs}; they must be the same")
    if group is models:
        raise ValueError(
            "process_group is the model's own: its collectives and gradwire's would mix. Create another "
            "with torch.distributed.new_group, or leave it out"
        )
