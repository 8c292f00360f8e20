"""The gradients of a step that have come, and where their means land."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.errors import GradwireError
from gradwire.kernels.dispatch import kernels_for
from gradwire.kernels.flagged import poison
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.gradient_bucket import GradientBucket, InTurn, Route
from gradwire.unit.parameters import ParameterSpec, Unit


@dataclass
class Intake:
    """The gradient buckets of a step, and the units and small gradients in them."""

    in_turn: InTurn = field(default_factory=InTurn)
    """The buckets."""
    turns: deque[GradientBucket] = field(default_factory=deque)
    """Those whose turn has come, for the reducer to take."""
    names: set[str] = field(default_factory=set)
    """Parameters in taken buckets, where small gradients may go early (`Layout.early`)."""
    missing: dict[tuple[int, int], int] = field(default_factory=dict)
    """Parts of units that are still to be compensated, by the numbers of flat buffer and unit."""
    direct: list[int] = field(default_factory=list)
    """Elements of each exchange that bypasses the flat buffers, in order."""
    small_regions: dict[str, Tensor] = field(default_factory=dict)
    """Small dense gradients that have arrived and are not sent yet."""
    all_ready: bool = False
    last_s: float = 0.0
    """When the last gradient came."""

    def add(self, bucket: GradientBucket) -> None:
        """Take in a gradient bucket, whose turn may come later."""
        self.last_s = max(self.last_s, bucket.at_s)
        self.in_turn.add(bucket)
        self.turns.extend(self.in_turn.next_turns())

    def completed(self, units: Sequence[tuple[Unit, int]]) -> list[Unit]:
        """Count the parts of `units` that have come, a number for each unit; returns the units that are now
        complete.
        """
        ready = []
        for unit, more in units:
            key = (unit.flat_buffer, unit.index)
            self.missing[key] = self.missing.get(key, len(unit.parts)) - more
            if self.missing[key] == 0:
                ready.append(unit)
        return ready

    def require_all_units(self, flat_buffers: Sequence[FlatBuffer]) -> None:
        """Raise if a unit never became complete or a bucket never had its turn: it was not exchanged."""
        complete = list(self.missing.values()).count(0)
        if not self.in_turn.is_empty or complete != sum(
            len(flat_buffer.units) for flat_buffer in flat_buffers
        ):
            raise GradwireError(
                "the gradients of some parameters never arrived: which ones need gradients must not change "
                "after wrapping and attaching the model"
            )

    def take_small(self, order: Sequence[ParameterSpec], names: Set[str]) -> list[Tensor]:
        """The small dense gradients of `names` that are still to be sent.

        In layout order, whatever the buckets: a ring adds in an order that depends on the position.
        """
        if not names:
            return []
        here = [spec.name for spec in order if spec.name in names and spec.name in self.small_regions]
        return [self.small_regions.pop(name) for name in here]

    @property
    def left_bytes(self) -> int:
        """Bytes of the small dense gradients that have not been sent."""
        return 4 * sum(region.numel() for region in self.small_regions.values())

    # -- where means land

    def place_of(self, route: Route, like: Tensor, factor: float) -> Tensor | None:
        """The place into which an exchange may decode the mean of a unit, if that is one stretch of one
        bucket.

        Args:
            route: of the unit.
            like: has the type of the mean.
            factor: the loss scale, if the mean must still be multiplied by it.
        """
        if len(route) != 1 or factor != 1.0:
            return None
        [(index, begin, size)] = route
        place = self.in_turn.taken[index].buffer[begin : begin + size]
        return place if place.dtype == like.dtype else None

    def places(self, route: Route) -> list[Tensor]:
        """The stretches of buckets in which the mean of a unit lands, in order."""
        taken, found = self.in_turn.taken, []
        for index, begin, size in route:
            found.append(taken[index].buffer[begin : begin + size])
        return found

    def copy_back_early(self, route: Route) -> None:
        """Copy a mean that lies in copies of buckets, along `route`, back to the model while others are still
        to come.
        """
        for index, begin, size in route:
            self.in_turn.taken[index].copy_back_early(begin, size)

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return next(iter(self.in_turn)).buffer.device

    def poison(self) -> None:
        """Overwrite all means with NaN, as all ranks do, so that every GradScaler skips."""
        for bucket in self.in_turn:
            bucket.poison()

    def poison_if(self, mark: Tensor) -> None:
        """Poison the means if `mark` is not 0; the host does not read it."""
        kernels_for(mark.device, torch.float32)[poison]([bucket.buffer for bucket in self.in_turn], mark)
