"""The model's buffers, such as BatchNorm's statistics: carried from rank 0 under the backward pass.

DDP broadcasts them before a forward pass, where every rank waits: for a latency, and on a slow link for their
bytes. But they change in forward passes, so what the next one begins with is known before its backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm import Comm, Pending

_SOURCE = 0
"""The rank whose buffers are everybody's, as in DDP."""

_PATIENCE = 3
"""So many steps in a row may have carried in vain before it is left to DDP for good."""


class Carried:
    """Room for the bytes of `buffers`, and a broadcast of them in every step.

    Wide types first: so each type is aligned within, and one collective is enough for all.
    """

    def __init__(self, buffers: Sequence[Tensor], rank: int) -> None:
        self._buffers, self._is_source = list(buffers), rank == _SOURCE
        self._shapes, self._dtypes = [each.shape for each in buffers], [each.dtype for each in buffers]
        ordered = sorted(buffers, key=lambda each: (-each.itemsize, str(each.dtype)))
        groups = [list(group) for _dtype, group in groupby(ordered, key=lambda each: each.dtype)]
        sizes = [sum(each.nbytes for each in group) for group in groups]
        self._bytes = torch.empty(sum(sizes), dtype=torch.uint8, device=buffers[0].device)
        self._types = [
            _OneType(group, part.view(group[0].dtype))
            for group, part in zip(groups, self._bytes.split_with_sizes(sizes), strict=True)
        ]
        self._pending: Pending | None = None
        self.is_stale = False
        """Whether what was packed is out of date on this rank."""
        self.failure: Exception | None = None
        """Why there is nothing worth sending. Peers wait, so something is sent nevertheless; the engine fails
        the step when it opens it."""

    def holds(self, buffers: Sequence[Tensor]) -> bool:
        """Whether it is made for these very tensors, which users may replace and resize."""
        if [each.shape for each in buffers] != self._shapes:
            return False
        same = zip(buffers, self._buffers, self._dtypes, strict=True)
        return all(one is other and one.dtype == dtype for one, other, dtype in same)

    def pack(self) -> None:
        """Copy the buffers, if they are those to be sent. Raises nothing; see `failure`."""
        self.is_stale, self.failure = False, None
        try:
            for each in self._types if self._is_source else ():
                each.gather(each.flat)
        except Exception as error:
            self.failure = error

    def look(self, buffers: Sequence[Tensor]) -> None:
        """See what has become of them: activations that are computed again count twice in BatchNorm.

        Bytes are compared, because batch_norm changes its statistics without telling their version counters.
        """
        same = self.holds(buffers)
        self.is_stale = not same or (self._is_source and any(each.has_changed() for each in self._types))

    def send(self, comm: Comm) -> None:
        """Issue the broadcast. Raises `TransportError`."""
        self._pending = comm.broadcast(self._bytes, _SOURCE)
        self._pending.then(lambda: None)  # its end is noted for the timeline

    def wait(self) -> None:
        """Block until they are here. Raises `TransportError` when the broadcast failed."""
        assert self._pending is not None, "sent first"
        self._pending.wait()

    @torch.no_grad()
    def land(self) -> None:
        """Overwrite this rank's buffers. Not before the backward pass is over, which may read them."""
        for each in () if self._is_source else self._types:
            # As DDP does: a graph that is kept for another backward pass stays valid.
            with _unsafe_preserve_version_counter(tuple(each.buffers)):
                torch._foreach_copy_(each.buffers, each.landing)


class _OneType:
    """The buffers of one type, and where they lie in what travels."""

    def __init__(self, buffers: Sequence[Tensor], flat: Tensor) -> None:
        self.buffers, self.flat = list(buffers), flat
        pieces = flat.split_with_sizes([each.numel() for each in buffers])
        self.landing = [piece.view(each.shape) for piece, each in zip(pieces, buffers, strict=True)]

    def gather(self, out: Tensor) -> Tensor:
        """Write the buffers into `out`, one after the other, and return it."""
        return torch.cat([each.detach().reshape(-1) for each in self.buffers], out=out)

    def has_changed(self) -> bool:
        """Whether any bit differs from what lies in `flat`."""
        now = self.gather(torch.empty_like(self.flat))
        return not torch.equal(now.view(torch.uint8), self.flat.view(torch.uint8))


def joins(ddp: DistributedDataParallel) -> bool:
    """Whether `join()` was entered: DDP keeps that until one with `enable=False`."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


class Buffers:
    """The buffers of one model, and who brings them: this, or DDP before the next forward pass.

    All of it runs on threads of the caller's, in the order of a step, but for `arrived`, which the engine's
    calls before it lets the backward pass go on.
    """

    def __init__(self, ddp: DistributedDataParallel, rank: int, world: int) -> None:
        # The worker refers to this, and ends with the model.
        self._ddp = weakref.ref(ddp)
        self._rank, self._world = rank, world
        self._ignored = frozenset(getattr(ddp.module, "_ddp_params_and_buffers_to_ignore", ()))
        self._known: Carried | None = None
        self._landing: Carried | None = None
        self._in_vain = 0
        self.packed: Carried | None = None
        """What the step under way carries."""
        self.current = False
        """Whether this rank has those of rank 0, as all do, so that DDP has nothing to broadcast."""

    def describe(self) -> str:
        """What ranks must have in common."""
        ddp = self._ddp()
        if ddp is None or not ddp.broadcast_buffers:
            return "not broadcast"
        hook = "by a hook of their own: " if hasattr(ddp, "buffer_hook") else ""
        return hook + ";".join(f"{tuple(each.shape)} {each.dtype}" for each in self._listed(ddp))

    def leave_to_ddp(self) -> None:
        """Carry nothing any more; between steps, on all ranks."""
        self._in_vain = _PATIENCE

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Spare DDP the broadcast if it would change nothing.

        Not under `join()`: ranks that have finished run no forward pass, and count on the broadcast.
        """
        if self.current and not joins(ddp):
            ddp.require_forward_param_sync = False  # DDP sets it again after every forward that needs it
        self.current = False

    def pack(self, measuring: bool) -> None:
        """A backward pass has its first bucket: copy what the forward pass has left, if it is to be carried.

        Not where users have switched it off or have a hook of their own for it; not under `join()`, where
        another rank than 0 may be the source; and not while dense steps measure what is on the wire alone.
        """
        self.packed, ddp = None, self._ddp()
        if ddp is None or measuring or self._world == 1 or self._in_vain >= _PATIENCE:
            return
        if joins(ddp) or hasattr(ddp, "buffer_hook") or not ddp.broadcast_buffers:
            return
        if buffers := self._listed(ddp):
            if self._known is None or not self._known.holds(buffers):
                self._known = Carried(buffers, self._rank)
            self._known.pack()
            self.packed = self._known

    def look(self) -> None:
        """The last bucket is there, and its verdict not yet under way."""
        ddp = self._ddp()
        if self.packed is not None and ddp is not None:
            self.packed.look(self._listed(ddp))

    def _listed(self, ddp: DistributedDataParallel) -> list[Tensor]:
        return [each for name, each in ddp.module.named_buffers() if name not in self._ignored]

    def arrived(self, here: bool, in_vain: bool) -> None:
        """A step has ended: whether what it carried is here, or was carried in vain, by the verdict."""
        self._landing, self.current = self.packed if here else None, False
        self._in_vain = self._in_vain + 1 if in_vain else 0 if here else self._in_vain

    def land(self) -> None:
        """The backward pass is over: its graph reads no buffer any more."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.land()
            self.current = True
