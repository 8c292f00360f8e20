"""Flat buckets of our own, for gradients that no wrapper gathers: `p.grad` is a view of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.step.gradient_bucket import GradientBucket
from gradwire.unit.parameters import ParameterSpec, Slot, slots_of

CAP_BYTES = 25 * 2**20
"""DDP's own default."""
SMALLEST_BYTES = 1 << 20
"""torch's compiler refuses caps below DDP's own first bucket."""


def cap_for(total_bytes: int, buckets: int) -> int:
    """Largest size of a bucket in bytes, for about `buckets` buckets: 1 MiB to 25 MiB, as each costs a call.

    Many buckets let encoding begin while most of the backward pass is still to come. If buckets are reduced
    in place, larger ones cost fewer collectives.

    >>> cap_for(44_700_000, buckets=32), cap_for(44_700_000, buckets=1)
    (1396875, 26214400)
    """
    return min(max(total_bytes // buckets, SMALLEST_BYTES), CAP_BYTES)


def assigned(specs: Sequence[ParameterSpec], cap_bytes: int) -> list[tuple[ParameterSpec, ...]]:
    """The parameters of each bucket: of one type, in the order of `specs`, and at most `cap_bytes`.

    A parameter that is larger has a bucket of its own. Buckets are in the order of their last parameters,
    in which they are likely to be full.

    >>> from gradwire.unit.parameters import specs_of
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double())
    >>> [[spec.name for spec in bucket] for bucket in assigned(specs_of(model), cap_bytes=80)]
    [['1.bias'], ['1.weight'], ['0.bias', '0.weight']]
    """
    open_: dict[torch.dtype, list[tuple[int, ParameterSpec]]] = {}
    full: list[list[tuple[int, ParameterSpec]]] = []
    for place, spec in enumerate(specs):
        bucket = open_.setdefault(spec.dtype, [])
        held = sum(other.numel for _place, other in bucket)
        if bucket and (held + spec.numel) * spec.dtype.itemsize > cap_bytes:
            full.append(bucket)
            bucket = open_[spec.dtype] = []
        bucket.append((place, spec))
    ordered = sorted([*full, *open_.values()], key=lambda bucket: bucket[-1][0])
    return [tuple(spec for _place, spec in bucket) for bucket in ordered]


def lies_at(tensor: Tensor, place: Tensor) -> bool:
    """True if `tensor` is the memory of `place`, of equal type and in equal order.

    >>> place = torch.zeros(2, 2)
    >>> lies_at(place.view(2, 2), place), lies_at(place.t(), place), lies_at(place.clone(), place)
    (True, False, False)
    """
    return tensor.data_ptr() == place.data_ptr() and tensor.dtype == place.dtype and tensor.is_set_to(place)


class OwnBucket:
    """Flat memory for the gradients of `specs`, number `index` of a step's buffers."""

    def __init__(
        self,
        index: int,
        specs: Sequence[ParameterSpec],
        device: torch.device,
        rows: Mapping[str, int] | None = None,
    ) -> None:
        """Allocate the bucket, and clear it.

        Args:
            index: number of the bucket; buckets are exchanged in this order.
            specs: parameters of one type; they lie one after another.
            device: device of the gradients.
            rows: rows of a parameter's gradient, by name, if they are fewer than its spec has; the others are
                filled with zeros.
        """
        self.index = index
        # The same tuple in every step, by which the reducer knows it again.
        self.entries = slots_of(specs)
        self.buffer = torch.zeros(self.entries[-1].stop, dtype=specs[0].dtype, device=device)
        self._beyond: dict[str, Tensor] = {}
        self.views = {
            entry.spec.name: self._view(entry, (rows or {}).get(entry.spec.name)) for entry in self.entries
        }
        """Views by parameter name, in the parameters' shapes.

        Nobody else gets these very tensors, as users put other memory behind a gradient
        (`p.grad.data = p.grad.data.clamp(-1, 1)`): hand out `view.detach()`, of the same memory.
        """
        start = self.buffer.data_ptr()
        self._addresses = range(start, start + self.buffer.nbytes)
        self.missing: set[str] = set()
        """Names of parameters whose gradient has not come in this step."""
        self.failure: BaseException | None = None

    def _view(self, entry: Slot, rows: int | None) -> Tensor:
        whole = entry.spec.shaped(self.buffer[entry.start : entry.stop])
        if rows is None or rows == entry.spec.shape[0]:
            return whole
        self._beyond[entry.spec.name] = whole[rows:]
        return whole[:rows]

    def begin(self) -> None:
        """Begin a step, in which no gradient has arrived yet."""
        self.missing, self.failure = {entry.spec.name for entry in self.entries}, None

    def fill(self, name: str, gradient: Tensor | None) -> bool:
        """Copy a parameter's gradient into the bucket, unless it lies there already; `None` counts as zeros.

        Returns True if it lies there. Raises nothing, as peers wait for the bucket: see `failure`.
        """
        self.missing.discard(name)
        view = self.views[name]
        if (beyond := self._beyond.get(name)) is not None:
            beyond.zero_()  # means have noise there, if zeros are not sent as such
        try:
            if gradient is None:
                view.zero_()
            elif gradient.layout != torch.strided:
                raise ValueError(
                    f"the gradient of {name!r} is sparse, and gradwire carries dense ones: use sparse=False "
                    "in embeddings"
                )
            elif self.holds(name, gradient):
                return True
            else:
                # In another order, as a matrix that was transposed, it may be here: torch does not copy that.
                is_here = gradient.data_ptr() in self._addresses
                view.copy_(gradient.detach().clone() if is_here else gradient.detach())
        except BaseException as error:
            self.failure = self.failure or error
        return False

    def holds(self, name: str, gradient: Tensor) -> bool:
        """True if a parameter's gradient lies in the bucket."""
        return gradient.layout == torch.strided and lies_at(gradient, self.views[name])

    @property
    def gradient_bucket(self) -> GradientBucket:
        """The bucket as the reducer takes it."""
        return GradientBucket(self.buffer, self.entries, self.index, failure=self.failure)
