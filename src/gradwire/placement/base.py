"""Placement of one attached model, as one value: the places of things, and the objects that move them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias, TypeVar

from torch import Tensor

from gradwire.comm.base import Comm
from gradwire.granularity import Granularity, granularity
from gradwire.placement.comms import StreamComm, by_the_host
from gradwire.placement.device import Device, HostDevice, fetch
from gradwire.placement.inline import Inline
from gradwire.placement.transfer import BufferTransfer, CopyTransfer, StreamTransfer, Waited

T = TypeVar("T")
Job: TypeAlias = Callable[[], None]
Post: TypeAlias = Callable[[Job], None]
PostAfter: TypeAlias = Callable[[Job, Callable[[Waited], None]], None]
Wait: TypeAlias = Callable[[threading.Event, Job], None]
"""Block until an event is set; call a function twice a second meanwhile, which ends the wait by raising."""
CommitTime: TypeAlias = Literal["now", "late"]
"""Time at which the host reads whether a step was finite, and commits it: before the step ends, or when the
next one begins, so that it need not wait for the device."""


@dataclass(frozen=True)
class Placement:
    """Places of one attached model's gradients, memory and bytes.

    - `comm` carries gradients, in tensors at the place of the memory.
    - `control` carries the status vote and everything else on which ranks agree, in tensors on the CPU. It
      may be `comm` itself. If ranks hold shards, it is over all of them.
    - `inside` is over the ranks that hold the other shards of this replica, `everyone` over all ranks; both
      carry tensors at the place of the memory.
    - `post` runs a function on the worker's thread.
    - `device` computes the gradients. `transfer` carries them to `memory`, where planes are and codecs run,
      and carries the means back.
    """

    name: str
    comm: Comm
    control: Comm
    post: Post
    device: Device = field(default_factory=HostDevice)
    memory: Device = field(default_factory=HostDevice)
    transfer: BufferTransfer = field(default_factory=BufferTransfer)
    commits: CommitTime = "now"
    post_later: Post | None = None
    """Runs a function as `post` does, called by any thread, such as one of gloo's. `None` if `post` can be
    called so."""
    post_after: PostAfter | None = None
    """Runs a function as `post` does, but once another has returned, which waits for the device. None where
    nothing is waited for."""
    wait: Wait | None = None
    """Function by which the training thread waits for a step's end, if it has to run the remaining
    jobs itself."""
    inside: Comm | None = None
    everyone: Comm | None = None

    @property
    def commits_late(self) -> bool:
        """True if a step is committed when the next one begins."""
        return self.commits == "late"

    @property
    def checksum_bytes(self) -> float:
        """The bytes of checksums among all bytes sent so far."""
        comms = (self.comm, self.control, self.inside)
        return sum(each.overhead_bytes for each in {each.carrier for each in comms if each is not None})

    @property
    def copies(self) -> bool:
        """True if the reducer works on copies of gradients, and means are copied back."""
        return self.memory.is_host and not self.device.is_host

    @property
    def granularity(self) -> Granularity:
        """Sizes into which work is cut on the device of the memory."""
        return granularity(is_host=self.memory.is_host)

    def fetch(self, value: Tensor) -> Callable[[], Tensor]:
        """Copy `value`, which is where the memory is, to the host, without waiting: see `device.fetch`."""
        return fetch(self.memory, value)

    def at_work(self, function: Callable[[], T]) -> T:
        """Call `function` as the reducer works: where memory is on a device, in the reducer's stream."""
        with self.transfer.working():
            return function()


def host(
    comm: Comm,
    post: Post,
    device: Device | None = None,
    control: Comm | None = None,
    inside: Comm | None = None,
    post_after: PostAfter | None = None,
) -> Placement:
    """Placement with memory and codecs on the CPU, and bytes over `comm`, which carries tensors on the CPU.

    Gradients of another `device` than the CPU are copied to pinned memory as they arrive, and means are
    copied back. That takes as many bytes of pinned memory as the gradients have, and none of the device's.

    Args:
        comm: comm of the payloads.
        post: runs a job on the reducer's thread.
        device: device of the gradients; by default the CPU.
        control: comm of everything on which ranks agree; by default `comm`.
        inside: comm of the ranks of this node, if they hold shards.
        post_after: waits for a copy beside the reducer's thread, and then posts a job.
    """
    device, control = HostDevice() if device is None else device, control or comm
    transfer = BufferTransfer() if device.is_host else CopyTransfer(device)
    return Placement(
        "host",
        comm,
        control,
        post,
        device,
        transfer=transfer,
        post_after=None if device.is_host else post_after,
        inside=inside,
        everyone=control,
    )


def staged(
    comm: Comm,
    post: Post,
    device: Device,
    control: Comm | None = None,
    inside: Comm | None = None,
    post_after: PostAfter | None = None,
) -> Placement:
    """Placement with memory and codecs on the `device`, and bytes over `comm`, which carries tensors on the
    CPU.

    Payloads are copied to pinned memory and back. `control`, by default `comm`, carries everything on which
    ranks agree, without copies. The other arguments are as in `host`.
    """
    transfer = StreamTransfer(device, follows=False)

    def posted(job: Job) -> None:
        post(lambda: _within(transfer.working, job))

    def posted_after(ready: Job, job: Callable[[Waited], None]) -> None:
        assert post_after is not None, "see below"
        post_after(ready, lambda waited: _within(transfer.working, partial(job, waited)))

    control = control or comm
    return Placement(
        "staged",
        by_the_host(comm, device),
        control,
        posted,
        device,
        memory=device,
        transfer=transfer,
        post_after=None if post_after is None else posted_after,
        inside=None if inside is None else by_the_host(inside, device),
        everyone=by_the_host(control, device),
    )


def stream(
    comm: Comm,
    control: Comm,
    device: Device,
    crashed: Callable[[BaseException], None] | None = None,
    inside: Comm | None = None,
    everyone: Comm | None = None,
) -> Placement:
    """Placement with memory and codecs on the `device`, and bytes over `comm`, whose collectives are work in
    a stream (NCCL).

    The thread that brings gradients issues everything, in a stream of the reducer's. The status vote travels
    over `control`, which carries tensors on the CPU. The host reads whether a step counts when the next one
    begins. `crashed` takes a job's exception; without it the thread raises it. Collectives of `inside` and of
    `everyone` (by default `comm`) are work in the same stream.
    """
    transfer = StreamTransfer(device)
    post = Inline(transfer.working, crashed)
    return Placement(
        "stream",
        StreamComm(comm),
        control,
        post,
        device,
        memory=device,
        transfer=transfer,
        commits="late",
        post_later=post.later,
        wait=post.wait,
        inside=None if inside is None else StreamComm(inside),
        everyone=StreamComm(everyone or comm),
    )


def _within(context: Callable[[], AbstractContextManager[None]], job: Job) -> None:
    with context():
        job()
