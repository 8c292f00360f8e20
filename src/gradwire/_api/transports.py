"""Placements of an attached model: the possible ones, by its process groups and the user's options."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gradwire._api.configuration import Configuration, PlacementName
from gradwire.agreement.agree import require_agreement
from gradwire.comm import Comm, ProcessGroupComm, groups
from gradwire.comm.apart import Lending
from gradwire.errors import TransportError
from gradwire.placement import Device, Placement, host, staged, stream, through_a_device
from gradwire.step.worker import Worker

_LOG = logging.getLogger("gradwire")
_NO_GLOO = (
    "%s. So what ranks agree on travels over the model's own backend, for which the host waits in every "
    "step, and gradients cannot be carried on the host"
)
_CPU = torch.device("cpu")
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True)
class Transports:
    """The process groups of one attached model, over the ranks of its own.

    `everyone` carries tensors on the CPU. `streamed` carries those of the model's device, as work in streams;
    `None` where nothing does, or nothing shall. Where there is no `cpu` group, `everyone` goes through the
    device.

    Where ranks hold shards, there are `parts`: the comm over those that hold the other shards of a replica,
    and the comm over those that hold the same, for tensors on the CPU. `streamed_parts` are the same for
    `streamed`.
    """

    device: Device
    everyone: Comm
    cpu: ProcessGroupComm | None
    streamed: ProcessGroupComm | None = None
    parts: tuple[ProcessGroupComm, ...] = ()
    streamed_parts: tuple[ProcessGroupComm, ...] = ()

    @property
    def comms(self) -> tuple[ProcessGroupComm, ...]:
        """One for each group; the first is over all ranks."""
        known = (self.cpu, self.streamed, *self.parts, *self.streamed_parts)
        return tuple({each.group: each for each in known if each is not None}.values())

    @property
    def carrier(self) -> ProcessGroupComm | None:
        """Comm for gradients on the CPU: over all ranks, or over those that hold the same shard. `None` if no
        group carries tensors on the CPU.
        """
        return self.parts[1] if self.parts else self.cpu

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups of all comms, the first over all ranks; at least one."""
        return tuple(group for each in self.comms for group in each.groups)


def connect(
    asked: Configuration,
    models: dist.ProcessGroup,
    own: dist.ProcessGroup | None,
    device: Device,
    where: torch.device,
    lending: Lending,
) -> Transports:
    """Make the group over which ranks agree: the user's `own`, or a new one like the model's. A collective.

    If the model's group carries no tensors on the CPU, a gloo group is made. If that fails, all ranks go on
    over the device, and a warning says what is slower.

    Args:
        asked: options of `attach`.
        models: the model's process group.
        own: the user's process group, if there is one.
        device: makes streams and memory of the model's device.
        where: device of the model's parameters.
        lending: makes process groups.

    Raises `ValueError` if `own` cannot be used, and on all ranks `TransportError` if there is no group that
    carries what is `asked` for.
    """
    if own is not None:
        if not isinstance(own, dist.ProcessGroup):
            raise ValueError(f"process_group={own!r} is not a process group that this rank is in")
        _check_ranks(own, models)
        if device.is_host or groups.carries_cpu(own):
            return _by_cpu(device, own)
        if not _streams(own, where):
            raise ValueError(
                "process_group carries no tensors on the CPU: create one with "
                "torch.distributed.new_group(backend='gloo'), or leave it out"
            )
    if (device.is_host and where.type == "cpu") or groups.carries_cpu(models):
        return _by_cpu(device, lending.borrow(models))
    try:
        return _by_cpu(device, lending.borrow(models, where, "gloo"))
    except TransportError as error:
        if not _streams(models, where):
            raise
        needs_gloo = asked.placement == "host" or asked.checksums
        require_agreement({"needs gloo": str(needs_gloo)}, through_a_device(ProcessGroupComm(models), where))
        if needs_gloo:
            raise
        if models.rank() == 0:
            _LOG.warning(_NO_GLOO, error)
    streamed = ProcessGroupComm(own or lending.borrow(models, where))
    return Transports(device, through_a_device(streamed, where), None, streamed)


def with_streams(
    asked: Configuration,
    transports: Transports,
    models: dist.ProcessGroup,
    own: dist.ProcessGroup | None,
    where: torch.device,
    lending: Lending,
) -> Transports:
    """Add a group whose collectives run in streams of the device, such as NCCL's, if there can be one.

    A collective. `transports` is returned as it is if the model is on the CPU, or "host" or checksums are
    `asked` for. Raises `ValueError`, on all ranks, if "device" and checksums are.

    Args:
        asked, models, own, where, lending: as in `connect`.
    """
    if transports.device.is_host or asked.placement == "host" or transports.cpu is None:
        return transports
    if not _streams(models if own is None else own, where):
        return transports
    if asked.checksums:
        if asked.placement == "device":
            raise ValueError(
                "checksums=True checks messages that the host sends, but with placement='device' NCCL sends "
                "from the device: leave one of the two out"
            )
        return transports
    if _streams(transports.cpu.group, where):
        return replace(transports, streamed=transports.cpu)
    return replace(
        transports, streamed=ProcessGroupComm(lending.borrow(models, where) if own is None else own)
    )


def with_parts(
    transports: Transports, members: Sequence[Sequence[int]], where: torch.device, lending: Lending
) -> Transports:
    """Add groups of some ranks to `transports`. A collective.

    Args:
        members: numbers of the ranks of each group: first the ranks with this replica's other shards, then
            those with the same shard.
        where, lending: as in `connect`.

    Raises `ValueError`, on all ranks, if torch cannot make the groups.
    """
    if transports.cpu is None:
        raise ValueError("nodes and shards need process groups for tensors on the CPU, and there are none")
    is_apart = transports.streamed is not None and transports.streamed is not transports.cpu
    like = [(transports.cpu.group, _CPU)]
    if transports.streamed is not None and is_apart:
        like.append((transports.streamed.group, where))
    made = lending.borrow_parts(transports.cpu.group, *((each, *of) for of in like for each in members))
    if made is None:
        raise ValueError(
            "ranks are in different numbers of process groups, so torch cannot make one per node; create "
            "groups of some ranks only after attaching"
        )
    parts = tuple(ProcessGroupComm(each) for each in made)
    streamed = () if transports.streamed is None else parts[-len(members) :]
    return replace(transports, parts=parts[: len(members)], streamed_parts=streamed)


def placements(
    asked: PlacementName, transports: Transports, carriers: Sequence[Comm], worker: Worker
) -> tuple[Placement, Placement | None]:
    """Choose where exchanges run: on the device, on the host, or some on either.

    Args:
        asked: "host" lets all exchanges run on the host.
        transports: comms of the device, and the device.
        carriers: comms on the CPU. The first is over all ranks. If ranks hold shards, two more are over the
            `parts` of `transports`.
        worker: runs the exchanges on its thread.

    Returns (placement of exchanges that stay on the device, placement of the others). The second is None if
    there is only one: on the CPU, with "host", or without a comm for tensors on the CPU.
    """
    device, control, comm = transports.device, carriers[0], carriers[-1]
    inside = carriers[1] if transports.parts else None
    by_host = host(comm, worker.post, device, control, inside, worker.post_after)
    if device.is_host or asked == "host":
        return by_host, None
    if transports.streamed is None:
        return staged(comm, worker.post, device, control, inside, worker.post_after), by_host
    if os.environ.get(_BLOCKING, "0") not in ("", "0") and control.rank == 0:
        _LOG.warning(
            "%s is set: the host waits for each collective of NCCL, so that none of it is hidden behind the "
            "backward pass. Unset it if nothing else needs it",
            _BLOCKING,
        )
    within, between = transports.streamed_parts or (None, transports.streamed)
    on_device = stream(between, control, device, worker.crashed, within, transports.streamed)
    return on_device, None if transports.cpu is None else by_host


def _by_cpu(device: Device, group: dist.ProcessGroup) -> Transports:
    comm = ProcessGroupComm(group)
    return Transports(device, comm, comm)


def _streams(group: dist.ProcessGroup, where: torch.device) -> bool:
    return groups.backend_at(group, where) in groups.STREAMED


def _check_ranks(group: dist.ProcessGroup, models: dist.ProcessGroup) -> None:
    mine, theirs = dist.get_process_group_ranks(group), dist.get_process_group_ranks(models)
    if mine != theirs:
        raise ValueError(f"process_group has ranks {mine}, the model's has {theirs}; they must be the same")
    if group is models:
        raise ValueError(
            "process_group is the model's own: its collectives and gradwire's would mix. Create another "
            "with torch.distributed.new_group, or leave it out"
        )
