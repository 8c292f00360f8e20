"""Δ, what a replica has learned since the last round, and what all have: the same buckets bring both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.kernels.range import LARGEST_GRADIENT
from gradwire.sources.buckets import CAP_BYTES, OwnBucket, assigned
from gradwire.sources.local_model import WEIGHT
from gradwire.sources.values import Values
from gradwire.unit.parameters import ParameterSpec


class Delta:
    """Δ by parameter, in buckets as those of plain modules, and beside it whether this replica counts."""

    def __init__(
        self, specs: Sequence[ParameterSpec], values: Values, device: torch.device, rows: Mapping[str, int]
    ) -> None:
        """Make buckets on `device` for `specs`, of whose sharded parameters so many `rows` are here."""
        groups = enumerate(assigned(specs, CAP_BYTES))
        self._values, self._is_padded = values, bool(rows)
        self.buckets = [OwnBucket(index, group, device, rows) for index, group in groups]
        self._weight = next(each.views[WEIGHT] for each in self.buckets if WEIGHT in each.views)

    def by_name(self) -> dict[str, Tensor]:
        """Δ, or its mean once a round has come, by parameter: new views, to hand out."""
        return {
            name: view.view(self._values.shared[name].shape)
            for bucket in self.buckets
            for name, view in bucket.views.items()
            if name != WEIGHT
        }

    @torch.no_grad()
    def pack(self) -> str:
        """Write Δ into the buckets; the name of a tensor in which it is not a number to be sent, or ""."""
        if self._is_padded:
            for bucket in self.buckets:
                bucket.buffer.zero_()
        views, bad = self.by_name(), ""
        for name, own, _shared, baseline in self._values.each():
            torch.sub(baseline, own.to(baseline.device), out=views[name])
            if views[name].numel():
                low, high = views[name].aminmax()
                if not (abs(float(low)) < LARGEST_GRADIENT and abs(float(high)) < LARGEST_GRADIENT):
                    bad = bad or name
        return bad

    def weigh(self, by: float) -> None:
        """Multiply Δ by a weight: 0.0 leaves zeros, also where it is not a number."""
        for bucket in self.buckets if by != 1.0 else ():
            bucket.buffer.mul_(by) if by else bucket.buffer.zero_()

    def tell(self, weight: float, *, finished: bool) -> None:
        """Send along how much this replica counts, and whether it has finished."""
        self._weight.copy_(torch.tensor([weight, finished], dtype=torch.float32, device="cpu"))

    def told(self, world: int) -> tuple[int, int]:
        """(Sum of the weights, number of replicas that have finished), once a round of `world` replicas has
        come.
        """
        weight, finished = (round(float(each) * world) for each in self._weight)
        return weight, finished
