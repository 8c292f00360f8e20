"""The model's buffers, such as BatchNorm's statistics: carried from rank 0 under the backward pass.

DDP broadcasts them before a forward pass, where every rank waits: for a latency, and on a slow link for their
bytes. But they change in forward passes, so what the next one begins with is known before its backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm import Comm, Pending

_SOURCE = 0
"""The rank whose buffers are everybody's, as in DDP."""


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
        self._versions: list[int] = []
        self._pending: Pending | None = None

    def holds(self, buffers: Sequence[Tensor]) -> bool:
        """Whether it is made for these very tensors, which users may replace and resize."""
        if [each.shape for each in buffers] != self._shapes:
            return False
        same = zip(buffers, self._buffers, self._dtypes, strict=True)
        return all(one is other and one.dtype == dtype for one, other, dtype in same)

    def pack(self) -> None:
        """Copy the buffers, if they are those to be sent."""
        self._versions = self._now()
        for each in self._types if self._is_source else ():
            torch.cat([buffer.detach().reshape(-1) for buffer in each.buffers], out=each.flat)

    def send(self, comm: Comm) -> None:
        """Issue the broadcast. Raises `TransportError`."""
        self._pending = comm.broadcast(self._bytes, _SOURCE)
        self._pending.then(lambda: None)  # its end is noted for the timeline

    def wait(self) -> None:
        """Block until they are here. Raises `TransportError` when the broadcast failed."""
        assert self._pending is not None, "sent first"
        self._pending.wait()

    @property
    def is_stale(self) -> bool:
        """Whether the source has changed its own since: recomputed activations count twice in BatchNorm."""
        return self._is_source and self._now() != self._versions

    def _now(self) -> list[int]:
        return [each._version for each in self._buffers]

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


class Buffers:
    """The buffers of one model, and who brings them: this, or DDP before the next forward pass.

    `before_forward` and `land` are called on the training thread, `carried` on the engine's, between them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._wanted = False
        self._known: Carried | None = None
        self._landing: Carried | None = None
        self.current = False
        """Whether every rank has those of rank 0, so that DDP has nothing to broadcast."""

    def describe(self, ddp: DistributedDataParallel) -> str:
        """What ranks must have in common."""
        if not ddp.broadcast_buffers:
            return "not broadcast"
        return ";".join(f"{tuple(each.shape)} {each.dtype}" for each in self._listed())

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Spare DDP the broadcast if it would change nothing, and see whether the next one may be ours.

        Not where users have switched it off or have a hook of their own for it, nor under `join()`, in which
        another rank than 0 may be the source.
        """
        joins = getattr(getattr(ddp, "_join_config", None), "enable", False)
        self._wanted = ddp.broadcast_buffers and not joins and not hasattr(ddp, "buffer_hook")
        if self.current and not joins:
            ddp.require_forward_param_sync = False  # DDP sets it again after every forward that needs it
        self.current = False

    def carried(self, comm: Comm) -> Carried | None:
        """What the forward pass has left, if there is anything to be carried."""
        if not self._wanted or comm.world == 1:
            return None
        buffers = self._listed()
        if self._known is None or not self._known.holds(buffers):
            self._known = Carried(buffers, comm.rank) if buffers else None
        return self._known

    def _listed(self) -> list[Tensor]:
        return [each for name, each in self._module.named_buffers() if name not in self._ignored]

    def arrived(self, carried: Carried | None) -> None:
        """A step has ended well and brought `carried`."""
        self._landing = carried

    def land(self) -> None:
        """The backward pass is over: its graph reads no buffer any more."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.land()
            self.current = True
