"""Flat memory in which unsent gradient lives, keyed by parameter and never by bucket.

A *flat buffer* is a run of slots that share an exchange (`gradwire.unit.parameters`). A *plane* holds one
number for each element of a flat buffer, such as what is unsent: *committed* planes are what the last good
step left, *working* planes are the current step's. The *error-fed* gradient is a step's gradient plus what is
unsent. To *compensate* is to compute it: line 1 of `gradwire.step.reducer`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.exchange.base import Exchange
from gradwire.kernels.compensation import Findings, compensate_marked
from gradwire.kernels.dispatch import kernels_for
from gradwire.kernels.pieces import Pieces
from gradwire.memory import UNSENT, Gradients
from gradwire.unit.context import ExchangeState, Fates, WayBack
from gradwire.unit.parameters import ParameterSpec, Slot, Unit, slots_of, units_of


class Scaled(NamedTuple):
    """The way of the loss scale of a step through a flat buffer: its exchange gets it with the gradients, or
    compensation divides it out, and landing multiplies means by it again."""

    for_exchange: float
    """The factor in the gradients that the exchange gets."""
    divided_out: float
    """The factor that is not in them; 1 where the exchange gets all of it."""


UNSCALED = Scaled(1.0, 1.0)


class FlatBuffer:
    """Slots that share an exchange, and the planes of its memory, by name.

    `committed` planes are those of the last committed exchange. `working` planes belong to the running
    exchange, which needs the plane `UNSENT` even without a memory. `kept` is the exchange's own state, by
    parameter.

    A commit can be undone until the next compensation, because the planes that it replaced still exist. Slots
    that stay open longer have copies of their earlier planes: `roll_back`.
    """

    def __init__(
        self,
        number: int,
        specs: Sequence[ParameterSpec],
        exchange: Exchange,
        boundaries: Sequence[int],
        device: torch.device,
        memory_dtype: torch.dtype | None = None,
        first: int = 0,
    ) -> None:
        """Allocate the planes, and divide the flat buffer into units.

        Args:
            number: number of the flat buffer.
            specs: its parameters, in order, all of one type.
            exchange: exchange of all its units; has a memory.
            boundaries: inner boundaries in elements. They move to the exchange's grain.
            device: device of the planes.
            memory_dtype: type of committed planes, by default that of working ones.
            first: the number of its first slot among those of all flat buffers.
        """
        assert exchange.memory is not None, "only exchanges with a memory have a flat buffer"
        self.number = number
        self.exchange, self.memory = exchange, exchange.memory
        self.slots = slots_of(specs)
        self.numel = sum(spec.numel for spec in specs)
        self.dtype = specs[0].type_for(self.memory)
        self.units = units_of(self.slots, boundaries, exchange.laws.grain, number)
        self.units_of: dict[str, tuple[Unit, ...]] = {slot.spec.name: () for slot in self.slots}
        for unit in self.units:
            for part in unit.parts:
                self.units_of[part.name] += (unit,)
        names = self.memory.planes
        remembered = memory_dtype or self.dtype
        self.committed = {name: torch.zeros(self.numel, dtype=remembered, device=device) for name in names}
        self.working = {
            name: torch.zeros(self.numel, dtype=self.dtype, device=device)
            for name in dict.fromkeys((UNSENT, *names))
        }
        self.kernels = kernels_for(self.x.device, self.dtype)
        self.constants: tuple[dict[Hashable, Any], ...] = tuple({} for _unit in self.units)
        """Values of the exchange itself, by unit (`ExchangeContext.once`)."""
        self.kept = ExchangeState()
        self.adds: bool = getattr(self.memory, "adds", False)
        self.first = first
        self._numbers = {slot.spec.name: number for number, slot in enumerate(self.slots, first)}
        self._replaced: dict[str, Tensor] = {}
        """Planes before the last commit."""
        self._way_back = WayBack[Tensor]()

    @property
    def memory_bytes(self) -> int:
        """Bytes of all planes, and of the exchange's own state."""
        groups = (self.committed, self.working, *self.kept.committed.values())
        return sum(tensor.nbytes for group in groups for tensor in group.values())

    @property
    def x(self) -> Tensor:
        """The error-fed gradient (numel,) of the running step; after its exchange, the unsent part."""
        return self.working[UNSENT]

    @cached_property
    def narrow(self) -> torch.dtype | None:
        """Type of its parameters, if values may travel in it and it is shorter than the planes'; else
        `None`.
        """
        return self.slots[0].spec.narrow_for(self.memory)

    def scaled(self, loss_scale: float) -> Scaled:
        """The way of a loss scale through it."""
        return Scaled(loss_scale, 1.0) if self.memory.as_arrived else Scaled(1.0, loss_scale)

    def of(self, unit: Unit) -> tuple[Tensor, Tensor | None]:
        """The error-fed gradient of a unit (unit.numel,), and its unsent part, read only; `None` where the
        memory keeps none.
        """
        here, unsent = slice(unit.start, unit.stop), self.committed.get(UNSENT)
        return self.working[UNSENT][here], None if unsent is None else unsent[here]

    def compensate(self, grads: Gradients, step: int, world: int) -> Findings:
        """Write memory plus the gradients `grads` of a bucket to the working planes; each piece begins where
        a slot does. `step` and `world` are as in `Memory.compensate`, and so is the result.
        """
        return self.memory.compensate(self.working, self.committed, grads, step, world)

    def compensate_marked(self, grads: Gradients, numbers: Sequence[int], step: int, marks: Tensor) -> None:
        """As `compensate`, but leave the findings on the device. Idle slots become zero.

        Args:
            grads: of a bucket. The memory only `adds` them.
            numbers: of their slots, in the order of the pieces.
            step: counts committed steps.
            marks: those of the step (`gradwire.step.marks`).
        """
        old, coefficient = self.committed.get(UNSENT), self.memory.coefficient(step)
        compensate = self.kernels[compensate_marked]
        compensate(self.x, old, grads.bucket, coefficient, grads.scale, grads.pieces, numbers, marks)

    def numbers_of(self, slots: Iterable[Slot]) -> tuple[int, ...]:
        """Numbers of slots among those of all flat buffers."""
        return tuple([self._numbers[slot.spec.name] for slot in slots])

    @cached_property
    def pieces(self) -> Pieces:
        """Pieces that map gradients laid out as the slots are."""
        return Pieces((slot.start, slot.start, slot.spec.numel) for slot in self.slots)

    def commit(self, idle: Iterable[Slot]) -> None:
        """Make the working planes the committed ones. `idle` slots keep their old memory, and add what this
        exchange has left unsent.

        An idle slot has brought zeros. Something may be unsent all the same: the owner of a shard keeps the
        rounding error of the mean (`exchange.scatter_reduce`).
        """
        left = [(slot, self.x[slot.start : slot.stop].clone()) for slot in idle]
        self.kept.commit()
        self.memory.update(self.working, self.committed)
        for name, old in self.committed.items():
            new = self.working[name]
            for slot, unsent in left:
                new[slot.start : slot.stop] = old[slot.start : slot.stop]
                if name == UNSENT:
                    new[slot.start : slot.stop].add_(unsent, alpha=1.0 / self.memory.weight)
            if new.dtype == old.dtype:
                self.committed[name], self.working[name] = new, old
                self._replaced[name] = old
            else:
                self._replaced[name] = _exchanged(old, new)

    def forget_unsent(self) -> None:
        """Set the unsent gradient to zero: `flush` has handed it over. `roll_back` can undo that, too."""
        self._replaced = {UNSENT: self.committed[UNSENT].clone()}
        self.committed[UNSENT].zero_()

    def begin(self) -> None:
        """Make the last commit final: the next compensation overwrites the planes that it replaced."""
        self._replaced = {}
        self.kept.begin()

    def roll_back(self, fates: Fates) -> None:
        """Undo the last commit, and earlier open ones, for dropped parameters; keep a way back for open ones.

        Only slots of dropped and of open parameters are copied.
        """
        for slot in self.slots:
            here = slice(slot.start, slot.stop)
            replaced = {plane: old[here] for plane, old in self._replaced.items()}
            before = self._way_back.roll_back(slot.spec.name, fates, replaced, torch.clone)
            for plane, old in before.items():
                self.committed[plane][here] = old
        self._replaced = {}
        self.kept.roll_back(fates)

    @property
    def open_names(self) -> Set[str]:
        """The open parameters: no optimizer has used their gradients of earlier exchanges yet."""
        return self._way_back.held.keys()

    def final(self, slot: Slot, plane: str) -> Tensor:
        """A committed plane of a slot, flat, without open exchanges; a view."""
        held = self._way_back.held.get(slot.spec.name, {})
        return held[plane] if plane in held else self.committed[plane][slot.start : slot.stop]

    def keep_open(self, slot: Slot, planes: Mapping[str, Tensor]) -> None:
        """Note that a slot is open, and its `planes` before that."""
        self._way_back.held[slot.spec.name] = dict(planes)


_BLOCK = 1 << 20
"""Elements that `_exchanged` copies at a time."""


def _exchanged(narrow: Tensor, wide: Tensor) -> Tensor:
    """Write `wide` (numel,) to `narrow`. Returns the old content of `narrow`, in the memory of `wide`.

    Going up, an element of the shorter type is written where the wider ones have been read already.

    >>> _exchanged(torch.ones(3, dtype=torch.bfloat16), torch.tensor([2.0, 3.0, 4.0]))
    tensor([1., 1., 1.], dtype=torch.bfloat16)
    """
    room = wide.view(narrow.dtype)[: narrow.numel()]
    for start in range(0, narrow.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        old = narrow[block].clone()
        narrow[block] = wide[block]
        room[block] = old
    return room
