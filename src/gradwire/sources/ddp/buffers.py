"""Broadcast of the model's buffers, such as BatchNorm's statistics, from rank 0 during the backward pass.

DDP broadcasts them before a forward pass, while every rank waits: for a latency, and on a slow link for their
bytes. But buffers change in forward passes only, so they are final before the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.placement import BufferTransfer, Device
from gradwire.sources.buffers import BufferBroadcast
from gradwire.sources.checks import in_words

_PATIENCE = 3
"""Number of steps in a row with a useless broadcast, after which DDP broadcasts the buffers for good."""


def joins(ddp: DistributedDataParallel) -> bool:
    """True if `join()` was entered: DDP remembers that until a `join` with `enable=False`."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


class Buffers:
    """Buffers of one model, broadcast during its backward pass, or by DDP before the next forward pass.

    All methods run on the caller's threads, in the order of a step; except `arrived`, which the worker's
    thread calls before it lets the backward pass go on.
    """

    def __init__(self, ddp: DistributedDataParallel, rank: int, world: int) -> None:
        # The worker refers to this, and ends with the model.
        self._ddp = weakref.ref(ddp)
        self._rank, self._world = rank, world
        self._ignored = frozenset(ddp.parameters_to_ignore)
        self._known: BufferBroadcast | None = None
        self._landing: BufferBroadcast | None = None
        self._in_vain = 0
        self.packed: BufferBroadcast | None = None
        """The broadcast of the current step."""
        self.current = False
        """True if this rank has rank 0's buffers, as all ranks do, so that DDP has nothing to broadcast."""

    def describe(self) -> str:
        """The text that must be the same on all ranks."""
        ddp = self._ddp()
        if ddp is None or not ddp.broadcast_buffers:
            return "not broadcast"
        hook = "by a hook of their own: " if hasattr(ddp, "buffer_hook") else ""
        return hook + in_words(self._named(ddp))

    def may_travel(self) -> bool:
        """True if there are buffers that DDP would broadcast before a forward pass.

        DDP lists the buffers when it is made: if there are none then, it never broadcasts any.
        """
        ddp = self._ddp()
        if ddp is None or self._world == 1 or not ddp.broadcast_buffers:
            return False
        return bool(self._listed(ddp))

    def leave_to_ddp(self) -> None:
        """Leave the broadcast of buffers to DDP from now on; called between steps, on all ranks."""
        self._in_vain = _PATIENCE

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Spare DDP the broadcast if it would change nothing.

        Not under `join()`: ranks that have finished run no forward pass, and count on the broadcast.
        """
        if self.current and not joins(ddp):
            ddp.require_forward_param_sync = False  # DDP sets it again after every forward that needs it
        self.current = False

    def pack(self, transfer: BufferTransfer, measuring: bool) -> None:
        """At the first bucket of a backward pass, copy the buffers as the forward pass has left them, if they
        are broadcast here.

        They are not if users have switched that off or have a hook of their own for it; under `join()`, where
        another rank than 0 may be the source; and while dense steps measure the collectives of gradients
        alone.
        """
        self.packed, ddp = None, self._ddp()
        if ddp is None or measuring or self._world == 1 or self._in_vain >= _PATIENCE:
            return
        if joins(ddp) or hasattr(ddp, "buffer_hook") or not ddp.broadcast_buffers:
            return
        if buffers := self._listed(ddp):
            if self._known is None or not self._known.holds(buffers):
                self._known = BufferBroadcast(buffers, self._rank)
            self._known.pack(transfer)
            self.packed = self._known

    def look(self, device: Device) -> None:
        """Note whether the broadcast buffers, on `device`, have changed since they were packed. Called with
        the last bucket, before the status vote.
        """
        ddp = self._ddp()
        if self.packed is not None and ddp is not None:
            self.packed.look(self._listed(ddp), device)

    def _listed(self, ddp: DistributedDataParallel) -> list[Tensor]:
        return [each for _, each in self._named(ddp)]

    def _named(self, ddp: DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
        return ((name, each) for name, each in ddp.module.named_buffers() if name not in self._ignored)

    def arrived(self, here: bool, in_vain: bool) -> None:
        """Note the end of a step. Its status vote tells whether the buffers that it broadcast are usable."""
        self._landing, self.current = self.packed if here else None, False
        self._in_vain = self._in_vain + 1 if in_vain else 0 if here else self._in_vain

    def land(self) -> None:
        """Overwrite the model's buffers by those that have arrived, after the backward pass, whose graph
        reads them no more.
        """
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.land()
            self.current = True
