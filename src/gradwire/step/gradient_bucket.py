"""Gradient buckets, and the place of each gradient in flat buffers and units.

Places are worked out once, because the same buckets come in every step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.exchange.base import Exchange
from gradwire.kernels.dispatch import kernels_for
from gradwire.kernels.pieces import Pieces
from gradwire.measure.clock import now_s
from gradwire.placement import TransferredBuffer
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.plan import ExchangePlan
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import Slot, Unit


@dataclass(frozen=True)
class GradientBucket:
    """A gradient bucket, ready since `at_s`: a flat tensor of gradients, in which their means land.

    It is no *flat buffer*: that is memory of the reducer's, and keyed by parameter. The buckets of a step are
    numbered from 0. `index` is the same on all ranks, whatever the order of arrival.
    """

    buffer: Tensor
    entries: tuple[Slot, ...]
    """The place of each parameter in `buffer`. In flat buffers, places are called slots."""
    index: int
    at_s: float = field(default_factory=now_s)
    failure: BaseException | None = None
    """Error while the bucket was brought here. Peers wait for it, so it is exchanged nevertheless, and the
    step fails."""
    home: TransferredBuffer | None = None
    """Carries the mean back to the model, if `buffer` is a copy."""

    def copy_back_early(self, begin: int, size: int) -> None:
        """Copy `size` elements from `begin` on, which hold a final mean, back to the model, if `buffer` is a
        copy.
        """
        if self.home is not None:
            self.home.copy_back_early(begin, begin + size)

    def poison(self) -> None:
        """Overwrite the mean with NaN, also where it has been copied back."""
        if self.home is not None:
            self.home.poison()
        else:
            self.buffer.fill_(torch.nan)


class InTurn:
    """The buckets of a step, handed out in the order of their indices, in which all ranks take them.

    >>> buckets = InTurn()
    >>> for index in (1, 2, 0):
    ...     buckets.add(GradientBucket(torch.zeros(1), (), index))
    ...     print([each.index for each in buckets.next_turns()])
    []
    []
    [0, 1, 2]
    """

    def __init__(self) -> None:
        self.taken: dict[int, GradientBucket] = {}
        """Buckets that were handed out, by index. Means land in them."""
        self._waiting: dict[int, GradientBucket] = {}

    def __iter__(self) -> Iterator[GradientBucket]:
        """All buckets that have come."""
        return chain(self.taken.values(), self._waiting.values())

    def add(self, bucket: GradientBucket) -> None:
        """Add a bucket, whose turn may come later."""
        self._waiting[bucket.index] = bucket

    def next_turns(self) -> list[GradientBucket]:
        """Hand out the buckets whose turn it is, each one once."""
        found = []
        while (turn := len(self.taken)) in self._waiting:
            bucket = self.taken[turn] = self._waiting.pop(turn)
            found.append(bucket)
        return found

    @property
    def is_empty(self) -> bool:
        """True if no bucket waits."""
        return not self._waiting


@dataclass(eq=False)
class DirectShare:
    """Neighbouring gradients in a bucket that bypass the flat buffers and share one exchange."""

    exchange: Exchange
    entries: tuple[Slot, ...]
    _plan: ExchangePlan | None = None

    def plan(self, region: Tensor, unit: int, common: ExchangeContext, *, checked: bool) -> ExchangePlan:
        """The plan of its exchange; made anew only if a step has other exchanges before it now.

        Args:
            region: its elements of a bucket, of whose type and device the plan is.
            unit: its number among the exchanges of a step that bypass the flat buffers.
            common: the context that these exchanges have in common.
            checked: whether the transport checks messages.
        """
        known, kernels = self._plan, kernels_for(region.device, region.dtype)
        if known is None or known.ctx.unit != unit or known.ctx.kernels is not kernels:
            ctx = replace(common, unit=unit, kernels=kernels)
            label, given = labelled(self.names), (self.exchange, region.numel(), region.dtype)
            known = self._plan = ExchangePlan(label, *given, ctx, checked)
        return known

    @cached_property
    def region(self) -> slice:
        """Elements of the bucket that these gradients occupy."""
        return slice(self.entries[0].start, self.entries[-1].stop)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.spec.name for entry in self.entries)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(entry.spec.numel for entry in self.entries)


@dataclass(frozen=True)
class BufferShare:
    """Gradients of a bucket that belong to one flat buffer: piece i is the whole gradient of slot number i.

    `pieces` are for compensation, which works on whole parameters. A unit's parts end where the unit does.
    """

    flat_buffer: FlatBuffer
    slots: tuple[Slot, ...]
    pieces: Pieces

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the slots among those of all flat buffers."""
        return self.flat_buffer.numbers_of(self.slots)

    @cached_property
    def label(self) -> str:
        """Name in timelines and notes of errors."""
        return labelled([slot.spec.name for slot in self.slots])


@dataclass(frozen=True)
class BucketPlan:
    """The places of all gradients in a bucket. `units` come with the number of their parameters in it."""

    entries: tuple[Slot, ...]
    direct: tuple[DirectShare, ...]
    shares: tuple[BufferShare, ...]
    units: tuple[tuple[Unit, int], ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """The parameters in the bucket."""
        return frozenset(entry.spec.name for entry in self.entries)


def bucket_plan(
    entries: tuple[Slot, ...], slots: Mapping[str, tuple[FlatBuffer, Slot]], direct: Mapping[str, Exchange]
) -> BucketPlan:
    """Sort the entries of one bucket: by flat buffer in the order of the bucket, or by exchange without a
    flat buffer.

    `slots` and `direct` are those of the `Layout`, by name of the parameter.
    """
    flat_buffers: defaultdict[FlatBuffer, list[tuple[Slot, Slot]]] = defaultdict(list)
    # By flat buffer and number: a unit's own hash goes through all of its pieces.
    units: Counter[tuple[FlatBuffer, int]] = Counter()
    for entry in entries:
        if entry.spec.name in slots:
            flat_buffer, slot = slots[entry.spec.name]
            flat_buffers[flat_buffer].append((entry, slot))
            units.update((flat_buffer, unit.index) for unit in flat_buffer.units_of[entry.spec.name])
    shares = (_share(flat_buffer, members) for flat_buffer, members in flat_buffers.items())
    counted = [(flat_buffer.units[index], count) for (flat_buffer, index), count in units.items()]
    counted.sort(key=lambda item: (item[0].flat_buffer, item[0].index))
    return BucketPlan(entries, tuple(_direct(entries, direct)), tuple(shares), tuple(counted))


def _share(flat_buffer: FlatBuffer, members: Sequence[tuple[Slot, Slot]]) -> BufferShare:
    pieces = Pieces((slot.start, entry.start, entry.spec.numel) for entry, slot in members)
    return BufferShare(flat_buffer, tuple(slot for _entry, slot in members), pieces)


def _direct(entries: Sequence[Slot], direct: Mapping[str, Exchange]) -> list[DirectShare]:
    together = groupby(entries, key=lambda entry: id(direct.get(entry.spec.name)))
    groups = [tuple(group) for _exchange, group in together]
    named = [(group[0].spec.name, group) for group in groups]
    return [DirectShare(direct[name], group) for name, group in named if name in direct]


Route: TypeAlias = tuple[tuple[int, int, int], ...]
"""Places of a unit in the buckets of a step, in the order of its elements: (index of a bucket, first element
in it, elements)."""


def route_of(unit: Unit, taken: Mapping[int, GradientBucket]) -> Route:
    """Route of a unit whose gradients all lie in `taken` buckets; neighbouring stretches are joined.

    >>> import torch
    >>> from gradwire.unit.parameters import ParameterSpec, slots_of, units_of
    >>> specs = [ParameterSpec(name, (size,), torch.float32, size) for name, size in (("v", 2), ("w", 3))]
    >>> (unit,) = units_of(slots_of(specs), (), 1)
    >>> entries = tuple(Slot(spec, start) for spec, start in zip(specs, (1, 3)))
    >>> route_of(unit, {4: GradientBucket(torch.zeros(6), entries, 4)})
    ((4, 1, 5),)
    """
    found = {entry.spec.name: (index, entry) for index, each in taken.items() for entry in each.entries}
    route: list[tuple[int, int, int]] = []
    for part in unit.parts:
        index, entry = found[part.name]
        begin, size = entry.start + part.start, part.numel
        last, first, length = route[-1] if route else (-1, 0, 0)
        if size and (last, first + length) == (index, begin):
            route[-1] = index, first, length + size
        elif size:
            route.append((index, begin, size))
    return tuple(route)


def labelled(names: Sequence[str]) -> str:
    """The first of several names.

    >>> labelled(["a"]), labelled(["a", "b"])
    ('a', 'a …')
    """
    return f"{names[0]} …" if len(names) > 1 else names[0]
