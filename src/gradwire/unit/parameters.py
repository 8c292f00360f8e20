"""Parameters as the layout sees them: names, shapes and types, and where each lies in memory.

Vocabulary: a *slot* is where one parameter lies; a *boundary* lies between two *units* of a flat buffer; a
unit is what one exchange agrees on at a time; a *part* is what a unit holds of one parameter.

The layout is a pure function of the module (reverse registration order, roughly the order in which backward
delivers) so it exists before DDP has built its buckets, and does not change when DDP rebuilds them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from gradwire.memory import Memory
from gradwire.unit.context import Part, is_dense

WHOLE = 0
"""The grain of an exchange (`Laws.grain`) whose boundaries lie between parameters."""


@dataclass(frozen=True)
class ParameterSpec:
    """Name, shape and type of a parameter, for the layout; equal on all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    stride: tuple[int, ...] | None = None
    """Strides of a parameter that is dense in another order than rows (`channels_last`, transposed); its
    bucket has the same."""
    shard_of: ParameterSpec | None = field(default=None, repr=False)
    """The parameter of which this is a shard (`gradwire.step.shards`)."""

    @property
    def whole(self) -> ParameterSpec:
        """The parameter itself, to which policies apply."""
        return self.shard_of or self

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of flat elements (numel,) of a bucket or plane, in the parameter's shape.

        >>> transposed = ParameterSpec("w", (2, 3), torch.float32, 6, (1, 2))
        >>> transposed.shaped(torch.arange(6))
        tensor([[0, 2, 4],
                [1, 3, 5]])
        """
        if self.stride is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def flat(self, shaped: Tensor) -> Tensor:
        """The inverse of `shaped`: a copy (numel,) in the order of memory."""
        flat = torch.empty(self.numel, dtype=shaped.dtype, device=shaped.device)
        self.shaped(flat).copy_(shaped)
        return flat

    @property
    def plane_dtype(self) -> torch.dtype:
        """Type in which its gradient accumulates: float64 for float64, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def type_for(self, memory: Memory) -> torch.dtype:
        """Type of the parameter's planes in `memory`."""
        return self.dtype if memory.as_arrived else self.plane_dtype

    def narrow_for(self, memory: Memory) -> torch.dtype | None:
        """Type of the parameter, if values may travel in it and it is shorter than the planes'; else
        `None`.
        """
        is_shorter = self.dtype.itemsize < self.type_for(memory).itemsize
        return self.dtype if is_shorter and not memory.whole else None


def specs_of(module: nn.Module, ignored: Iterable[str] = ()) -> tuple[ParameterSpec, ...]:
    """Specs of the trainable parameters of `module`, in reverse registration order, without those whose names
    are `ignored`.
    """
    skip = set(ignored)
    specs = [
        ParameterSpec(name, tuple(p.shape), p.dtype, p.numel(), _stride_of(p))
        for name, p in module.named_parameters()
        if p.requires_grad and name not in skip
    ]
    return tuple(reversed(specs))


def _stride_of(parameter: Tensor) -> tuple[int, ...] | None:
    """The strides that DDP gives the gradient of a dense parameter; `None` for row order."""
    if parameter.is_contiguous() or not is_dense(parameter):
        return None
    return tuple(parameter.stride())


def layout_hash(specs: Sequence[ParameterSpec]) -> str:
    """16 hexadecimal digits over names, shapes and dtypes in layout order."""
    text = "\n".join(f"{spec.name} {spec.shape} {spec.dtype}" for spec in specs)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Slot:
    """The place of a parameter in memory, its flat buffer or a gradient bucket: elements [start, stop)."""

    spec: ParameterSpec
    start: int

    @property
    def stop(self) -> int:
        """Number of the element after its last one."""
        return self.start + self.spec.numel


@dataclass(frozen=True)
class Unit:
    """Elements [start, stop) of a flat buffer, exchanged together."""

    flat_buffer: int
    index: int
    start: int
    stop: int
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"flat buffer {self.flat_buffer} unit {self.index}"


def slots_of(specs: Sequence[ParameterSpec]) -> tuple[Slot, ...]:
    """Slots of parameters that lie one after the other."""
    starts = accumulate((spec.numel for spec in specs), initial=0)
    return tuple(Slot(spec, start) for spec, start in zip(specs, starts, strict=False))


def units_of(
    slots: Sequence[Slot], boundaries: Iterable[int], grain: int, flat_buffer: int = 0
) -> tuple[Unit, ...]:
    """The units between `boundaries`, which move down to a multiple of `grain`, or to the nearest end of a
    parameter.

    Args:
        slots: slots of the flat buffer.
        boundaries: inner boundaries in elements.
        grain: grain of the exchange (`Laws`).
        flat_buffer: number of the flat buffer.
    """
    ends = [0, *(slot.stop for slot in slots)]
    numel = ends[-1]
    inner = {boundary for boundary in boundaries if 0 < boundary < numel}
    if grain == WHOLE:
        inner = {_nearest(ends, boundary) for boundary in inner}
    else:
        inner = {boundary // grain * grain for boundary in inner}
    bounds, starts = sorted({0, numel} | inner), [slot.start for slot in slots]
    return tuple(
        Unit(flat_buffer, index, start, stop, _parts(slots, starts, ends[1:], start, stop))
        for index, (start, stop) in enumerate(pairwise(bounds))
    )


def _nearest(ends: Sequence[int], boundary: int) -> int:
    """The one of ascending `ends` that is nearest to `boundary`; ties go to the lower end. 0 < boundary < the
    last end.
    """
    above = bisect_left(ends, boundary)
    return min(ends[above - 1], ends[above], key=lambda end: abs(end - boundary))


def _parts(
    slots: Sequence[Slot], starts: Sequence[int], stops: Sequence[int], start: int, stop: int
) -> tuple[Part, ...]:
    overlapping = slots[bisect_right(stops, start) : bisect_left(starts, stop)]
    return tuple(
        Part(
            slot.spec.name,
            slot.spec.shape,
            max(start, slot.start) - slot.start,
            min(stop, slot.stop) - slot.start,
        )
        for slot in overlapping
    )
