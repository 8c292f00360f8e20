"""The mean over replicas of a model's floating buffers, such as BatchNorm's statistics, beside a round."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.comm import Comm, Pending
from gradwire.kernels.range import LARGEST_GRADIENT
from gradwire.placement import BufferTransfer, TransferredBuffer

_KEY = "means of buffers"


class BufferMeans:
    """Mean over replicas of the changes of buffers: one all-reduce of the changes, and of the number of
    replicas that count.

    A replica leaves out a buffer that is not finite, or has another shape than all ranks have agreed on. It
    then sends zeros of the agreed shape, so that lengths are equal on all ranks. The mean is over the other
    replicas, and all take it. If all leave a buffer out, each keeps its own.

    `base` has the buffers as all ranks last agreed on them, in the type in which they are summed. It is NaN
    for buffers of which they have agreed on the shape alone. It has the same bits on all ranks.
    """

    failure: BaseException | None = None

    def __init__(self, here: Callable[[], Mapping[str, Tensor]], device: torch.device) -> None:
        """`here()` are the buffers by name: modules put new tensors in their place. Sums are on `device`."""
        self._here, self._device = here, device
        self.base: dict[str, Tensor] = {}
        self._sent: dict[str, Tensor] = {}
        """Copy of `base` when this replica's changes were packed."""
        self._shapes: dict[str, torch.Size] = {}
        """Shapes that buffers had then."""
        self._come: Mapping[str, Tensor] | None = {}
        """Means to land; `None` while the all-reduce runs."""
        self._flat: Tensor
        self._transfer: BufferTransfer
        self._transferred: TransferredBuffer
        self._pending: Pending | None = None

    def begin(self, names: Container[str] | None = None) -> None:
        """Take the present buffers, all of them or those of `names`, as equal on all ranks."""
        for name, each in self._here().items():
            if names is None or name in names:
                wide = torch.float64 if each.dtype == torch.float64 else torch.float32
                self.base[name] = each.detach().to(self._device, wide, copy=True)

    # -- in a round

    @torch.no_grad()
    def pack(self, transfer: BufferTransfer, *, counts: bool) -> None:
        """Hand over this replica's changes; zeros unless it `counts`. Raises nothing; see `failure`."""
        self._transfer = transfer
        self._flat = self.changes(counts=counts)
        self._transferred = transfer.start(_KEY, self._flat)

    @torch.no_grad()
    def changes(self, *, counts: bool) -> Tensor:
        """This replica's changes since `base`, and by buffer whether they count (elements + buffers,); zeros
        unless it `counts`. Raises nothing; see `failure`.
        """
        self._come, self._sent, self.failure = None, dict(self.base), None
        kinds = {each.dtype for each in self._sent.values()}
        numel = sum(each.numel() for each in self._sent.values()) + len(self._sent)
        kind = torch.float64 if torch.float64 in kinds else torch.float32
        flat = torch.zeros(numel, dtype=kind, device=self._device)
        try:
            here = self._here()
            self._shapes = {name: here[name].shape for name in self._sent if name in here}
            for (name, base), part, says in zip(self._sent.items(), *self._parts(flat), strict=True):
                if counts and self._shapes.get(name) == base.shape:
                    changed = here[name].to(base) - _known(base)
                    if _is_sound(changed):
                        part.copy_(changed.reshape(-1))
                        says.fill_(1.0)
        except Exception as error:
            self.failure = error
        return flat

    def _parts(self, flat: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Views of `flat`: one (numel,) for the change of each buffer sent, and a last one (buffers,) for the
        number of replicas in each sum.
        """
        *sums, said = flat.split_with_sizes(
            [*(each.numel() for each in self._sent.values()), len(self._sent)]
        )
        return sums, said

    def is_stale(self, *, deferred: bool) -> bool:
        """Buffers travel as they were when the round was sent."""
        return False

    def send(self, comm: Comm) -> None:
        """Issue the all-reduce. Raises `TransportError`."""
        try:
            self._transferred.ready()
        except BaseException as error:
            self.failure = error
        self._pending = comm.all_reduce(self._transferred.buffer)

    def wait(self) -> None:
        """Block until the sum is there. Raises `TransportError` when the all-reduce failed."""
        assert self._pending is not None, "sent first"
        self._pending.wait()

    @property
    def told(self) -> tuple[float, ...]:
        """24 bits over the shape of each buffer when it was packed, for this rank's row."""
        return tuple(number_of(self._shapes.get(name)) for name in self._sent)

    def heard(self, rows: Sequence[tuple[float, ...]]) -> None:
        """Read the shapes of all ranks: if a buffer has one shape on all, the next round uses that shape."""
        for name, told in zip(self._sent, zip(*rows, strict=True), strict=True):
            shape = self._shapes.get(name)
            if shape is not None and len(set(told)) == 1 and shape != self.base[name].shape:
                self.base[name] = self.base[name].new_full(shape, torch.nan)

    # -- when it lands

    def come(self) -> Mapping[str, Tensor]:
        """The means that the last round has brought and that have not landed, by name."""
        if self._come is None:
            self._transferred.copy_back()
            self._transfer.join()
            self.summed(self._flat)
        return self._come or {}

    def summed(self, flat: Tensor) -> None:
        """Take the sum of all replicas' `changes`: the means are what is to land."""
        sums, said = self._parts(flat)
        self._come = {
            name: _known(base) + (summed / by).view(base.shape).to(base.dtype)
            for (name, base), summed, by in zip(self._sent.items(), sums, said.tolist(), strict=True)
            if by
        }

    def resume(self, come: Mapping[str, Tensor]) -> None:
        """Take up a round that was in flight when a checkpoint was saved: `come` are the means that had
        arrived, by name.
        """
        self._come = {name: each.to(self._device) for name, each in come.items()}

    @torch.no_grad()
    def land(self) -> None:
        """Go on from the means, rounded to the buffers' types."""
        here = self._here()
        for name, mean in self.come().items():
            own = here.get(name)
            # Elsewhere it may have been replaced since; the base is the same on all ranks nevertheless.
            self.base[name] = mean if own is None else mean.to(own.dtype).to(mean.dtype)
            if own is not None and own.shape == mean.shape:
                own.copy_(mean)
        self._come = {}

    # -- between rounds

    def take_up(self, base: Mapping[str, Tensor]) -> None:
        """Go on from another `base`, of a checkpoint."""
        self.base = {name: each.to(self._device, copy=True) for name, each in base.items()}

    @torch.no_grad()
    def restore(self, *, reshaped: bool = False) -> None:
        """Overwrite buffers by `base`, where that is finite and of the same shape.

        With `reshaped` buffers take on the shape as well.
        """
        here = self._here()
        for name, base in self.base.items():
            own = here.get(name)
            if own is not None and (reshaped or own.shape == base.shape) and bool(base.isfinite().all()):
                put(own, base)


def put(own: Tensor, value: Tensor) -> None:
    """Overwrite `own`, in the shape of `value`."""
    if own.shape != value.shape:
        own.resize_(value.shape)
    own.copy_(value)


def number_of(told: object) -> float:
    """24 bits over `told` as a text, which a float32 holds exactly."""
    return float(zlib.crc32(str(told).encode()) % 2**24)


def _known(base: Tensor) -> Tensor:
    """`base`, with zeros in the place of NaN: such an element is sent whole."""
    return base.nan_to_num(0.0, 0.0, 0.0)


def _is_sound(changed: Tensor) -> bool:
    if not changed.numel():
        return False  # there is nothing to say
    low, high = changed.aminmax()
    return abs(float(low)) < LARGEST_GRADIENT and abs(float(high)) < LARGEST_GRADIENT
