"""A broadcast of the model's buffers, such as BatchNorm's statistics, beside the gradients of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradwire.comm import Comm, Pending
from gradwire.placement import BufferTransfer, Device, TransferredBuffer, fetch

_KEY = "buffers"
_SOURCE = 0
"""The rank whose buffers all ranks get, as in DDP."""


def _unchanged() -> bool:
    return False


class BufferBroadcast:
    """Memory for the bytes of `buffers`, and their broadcast in every step.

    Wide types come first, so that each type is aligned, and one collective is enough for all.
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
        self._transfer: BufferTransfer
        self._transferred: TransferredBuffer
        self._pending: Pending | None = None
        self._are_others = False
        self._changed: Callable[[], object] = _unchanged
        self._changed_before: Callable[[], object] = _unchanged
        self.failure: BaseException | None = None
        """Why packing failed. Peers wait, so something is sent nevertheless; the reducer fails the step."""

    def holds(self, buffers: Sequence[Tensor]) -> bool:
        """True if it was made for these very tensors, which users may replace and resize."""
        if [each.shape for each in buffers] != self._shapes:
            return False
        same = zip(buffers, self._buffers, self._dtypes, strict=True)
        return all(one is other and one.dtype == dtype for one, other, dtype in same)

    def pack(self, transfer: BufferTransfer) -> None:
        """Copy the buffers if this rank sends them, and hand the copy over. Raises nothing; see `failure`."""
        self._changed_before, self._changed = self._changed, _unchanged
        self._are_others, self.failure, self._transfer = False, None, transfer
        try:
            for each in self._types if self._is_source else ():
                each.gather(each.flat)
        except Exception as error:
            self.failure = error
        self._transferred = self._transfer.start(_KEY, self._bytes)

    def look(self, buffers: Sequence[Tensor], device: Device) -> None:
        """Note whether the buffers have changed since they were packed: recomputed activations count twice in
        BatchNorm.

        Bytes are compared, because batch_norm changes its statistics without changing version counters. The
        `device` of the buffers compares, and is not waited for.
        """
        self._are_others = not self.holds(buffers)
        if self._is_source and not self._are_others:
            self._changed = fetch(device, torch.stack([each.has_changed() for each in self._types]).any())

    def is_stale(self, *, deferred: bool) -> bool:
        """True if the packed buffers are out of date on this rank; waits for the device that compares them.

        A `deferred` step cannot wait: it takes the device's finding of the previous step.
        """
        return self._are_others or bool((self._changed_before if deferred else self._changed)())

    def send(self, comm: Comm) -> None:
        """Issue the broadcast. Raises `TransportError`."""
        try:
            self._transferred.ready()
        except BaseException as error:
            self.failure = error
        self._pending = comm.broadcast(self._transferred.buffer, _SOURCE)
        self._pending.then(lambda: None)  # its end is noted for the timeline

    def wait(self) -> None:
        """Block until they are here. Raises `TransportError` when the broadcast failed."""
        assert self._pending is not None, "sent first"
        self._pending.wait()

    @torch.no_grad()
    def land(self) -> None:
        """Overwrite this rank's buffers; not before the backward pass is over, which may read them."""
        if self._is_source:
            return
        self._transferred.copy_back()
        self._transfer.join()
        for each in self._types:
            # As DDP does: a graph that is kept for another backward pass stays valid.
            with _unsafe_preserve_version_counter(tuple(each.buffers)):
                torch._foreach_copy_(each.buffers, each.landing)


class _OneType:
    """Buffers of one type, and their places in the broadcast bytes."""

    def __init__(self, buffers: Sequence[Tensor], flat: Tensor) -> None:
        self.buffers, self.flat = list(buffers), flat
        pieces = flat.split_with_sizes([each.numel() for each in buffers])
        self.landing = [piece.view(each.shape) for piece, each in zip(pieces, buffers, strict=True)]

    def gather(self, out: Tensor) -> Tensor:
        """Write the buffers into `out`, one after the other, and return it."""
        return torch.cat([each.detach().reshape(-1) for each in self.buffers], out=out)

    def has_changed(self) -> Tensor:
        """True if any bit of the buffers differs from `flat`: a bool () on their device."""
        now = self.gather(torch.empty_like(self.flat))
        return (now.view(torch.uint8) != self.flat.view(torch.uint8)).any()
