"""A whole step on one thread per rank: a reducer, buckets of our own, and what landed in them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gradwire.comm import Comm, ThreadComm
from gradwire.control.controller import controller_for
from gradwire.measure.clock import now_s
from gradwire.memory import UNSENT
from gradwire.placement import CommitTime, Placement, Post, device_at
from gradwire.planning.boundaries import even_boundaries
from gradwire.planning.tuning import USUAL
from gradwire.recipes import recipe
from gradwire.sources.nodes.level import NodeReducer
from gradwire.step.environment import Controller, ReducerEnvironment
from gradwire.step.gradient_bucket import GradientBucket
from gradwire.step.reducer import Reducer
from gradwire.step.step import Step
from gradwire.unit.parameters import ParameterSpec, Slot, slots_of
from tests.support.where import WHERE

SHAPES: dict[str, tuple[int, ...]] = {
    "first.weight": (37, 61),
    "first.bias": (61,),
    "nothing": (0, 4),
    "middle.weight": (53, 41),
    "scalar": (),
    "last.weight": (47, 59),
    "last.bias": (59,),
}
"""Prime sides, so that cuts fall inside parameters; in forward order, as a module registers them."""

NAMES = tuple(SHAPES)
ONE_BUCKET: tuple[tuple[str, ...], ...] = (NAMES,)
REVERSED = (
    ("last.bias", "last.weight"),
    ("scalar", "middle.weight", "nothing"),
    ("first.bias", "first.weight"),
)
SHUFFLED = (
    ("scalar", "last.weight", "first.bias"),
    ("first.weight", "last.bias"),
    ("middle.weight", "nothing"),
)
ALONE = tuple((name,) for name in reversed(NAMES))
BUCKETS = {"one": ONE_BUCKET, "reversed": REVERSED, "shuffled": SHUFFLED, "alone": ALONE}


def specs(
    dtype: torch.dtype | Callable[[str], torch.dtype] = torch.float32,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> tuple[ParameterSpec, ...]:
    """The layout order is the reverse of registration."""
    of = dtype if callable(dtype) else lambda _name: dtype
    return tuple(
        ParameterSpec(name, shape, of(name), torch.Size(shape).numel())
        for name, shape in reversed(shapes.items())
    )


def gradients(
    rank: int, step: int, dtype: torch.dtype | Callable[[str], torch.dtype] = torch.float32
) -> dict[str, Tensor]:
    """Normal numbers that depend on rank, step and name alone; no element is zero."""
    of = dtype if callable(dtype) else lambda _name: dtype
    return {name: values.to(WHERE, of(name), copy=True) for name, values in _drawn(rank, step).items()}


@cache
def _drawn(rank: int, step: int) -> dict[str, Tensor]:
    drawn = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + number)
        values = torch.randn(torch.Size(shape).numel(), generator=generator, dtype=torch.float64)
        drawn[name] = values + values.sign() * 0.01
    return drawn


@dataclass(frozen=True)
class Outcome:
    """One step on one rank."""

    mean: dict[str, Tensor]
    step: Step
    memory: dict[str, Tensor]

    @property
    def error(self) -> BaseException | None:
        """What `backward()` would raise."""
        return self.step.error

    def flat(self) -> Tensor:
        """All means in a row, float64."""
        return flat(self.mean)


def flat(values: Mapping[str, Tensor]) -> Tensor:
    """All of them in a row by name, float64."""
    return torch.cat([values[name].double() for name in sorted(values)])


def parted(comm: Comm, per_node: int) -> tuple[Comm, Comm]:
    """The comms of a rank inside its node and between nodes, where ranks are numbered node by node."""
    assert isinstance(comm, ThreadComm)
    ranks = range(comm.world)
    nodes = [ranks[first : first + per_node] for first in ranks[::per_node]]
    return comm.split(nodes), comm.split([ranks[place::per_node] for place in range(per_node)])


TUNING = USUAL
"""Of rigs for which no other is given."""


class Rig:
    """One rank. `unit_elements` cuts flat buffers into many small units, as a large model's would be.

    With `per_node` ranks on each node these add up among themselves, and the reducer gets shards.
    `wrap` is put around every comm. `before` is a controller under which dense steps come first.
    `options` are values of the `ReducerEnvironment`, where they differ from the usual.
    """

    def __init__(
        self,
        comm: Comm,
        text: str,
        *,
        unit_elements: int | None = None,
        per_node: int = 1,
        dtype: torch.dtype | Callable[[str], torch.dtype] = torch.float32,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        control: Comm | None = None,
        commits: CommitTime = "now",
        place: Callable[[Post], Placement] | None = None,
        wrap: Callable[[Comm], Comm] = lambda comm: comm,
        before: Controller | None = None,
        **options: Any,
    ) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._finished: list[Step] = []
        self._ended = threading.Event()
        post, finished = self._jobs.append, self._note_finished
        known, everyone = specs(dtype, shapes), comm
        if place is None:
            inside, comm = (None, comm) if per_node == 1 else parted(comm, per_node)
            inside, comm = None if inside is None else wrap(inside), wrap(comm)
            control, device = control or (comm if inside is None else wrap(everyone)), device_at(WHERE)
            placement = Placement("rig", comm, control, post, device, device, commits=commits, inside=inside)
        else:
            placement = place(post)
        self._placement = placement
        self.level: NodeReducer | None = None
        if placement.inside is not None:
            self.level = NodeReducer(known, placement.inside.world)
            known, finished = self.level.specs, partial(self.level.finish, deliver=finished)
        env = ReducerEnvironment(
            placement, controller_for=controller_for, finished=finished, **{"tuning": TUNING} | options
        )
        self.reducer = Reducer(known, recipe(text), env, before)
        if self.level is not None:
            self.level.join(self.reducer)
        self._taker = self.level or self.reducer
        fixed = recipe(text).build()
        if unit_elements is not None and fixed.next is None:
            cutter = partial(even_boundaries, unit_elements=unit_elements)
            self.reducer.install(replace(fixed, cutter=cutter))

    @property
    def memory(self) -> dict[str, Tensor]:
        """A copy of what is remembered, by parameter name."""
        layout = self.reducer.layout
        return {
            name: layout.memory(name).clone() for name in layout.slots if UNSENT in layout.planes_of(name)
        }

    @property
    def planes(self) -> dict[tuple[str, str], Tensor]:
        """A copy of all that is remembered, by parameter and plane, and of what exchanges keep by kind."""
        layout = self.reducer.layout
        planes = {
            (name, plane): layout.memory(name, plane).clone()
            for name in layout.slots
            for plane in layout.planes_of(name)
        }
        for flat_buffer in layout.flat_buffers:
            for kind, tensors in flat_buffer.kept.committed.items():
                planes |= {(name, kind): tensor.clone() for name, tensor in tensors.items()}
        return planes

    def step(
        self,
        grads: Mapping[str, Tensor],
        buckets: Sequence[Sequence[str]] = REVERSED,
        order: Sequence[int] | None = None,
        failures: Mapping[int, BaseException | None] = MappingProxyType({}),
    ) -> Outcome:
        """Hand over every bucket and let the reducer run as soon as it can, as its worker would.

        `order` are the indices of the buckets in the order of arrival, by default one after the other.
        `failures` are why buckets could not be brought, by index.
        """
        gradient_buckets = [
            replace(_gradient_bucket(grads, names, index), failure=failures.get(index))
            for index, names in enumerate(buckets)
        ]
        *early, last = range(len(buckets)) if order is None else order
        self._ended.clear()
        self._placement.transfer.follow()
        self._run(partial(self._taker.begin_step, now_s()))
        for index in early:
            self._run(partial(self._taker.bucket_ready, gradient_buckets[index]))
        self._run(partial(self._taker.bucket_ready, gradient_buckets[last]), self._taker.all_ready)
        if self._placement.wait is not None:
            self._placement.wait(self._ended, lambda: None)
        self._placement.transfer.join()
        assert len(self._finished) == 1, "a step must be finished exactly once"
        return Outcome(_means(gradient_buckets), self._finished.pop(), self.memory)

    def _note_finished(self, step: Step) -> None:
        self._finished.append(step)
        self._ended.set()

    def _run(self, *jobs: Callable[[], None]) -> None:
        for job in jobs:
            self._placement.post(partial(self._perform, job))
        while self._jobs:
            self._perform(self._jobs.popleft())

    def _perform(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self.reducer.crash(error)


@cache
def _entries(names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Slot, ...]:
    """The same tuple in every step, by which the reducer knows a bucket again, as of a source."""
    return slots_of(
        [ParameterSpec(name, (size,), torch.float32, size) for name, size in zip(names, sizes, strict=True)]
    )


def _gradient_bucket(grads: Mapping[str, Tensor], names: Sequence[str], index: int) -> GradientBucket:
    sizes = tuple(grads[name].numel() for name in names)
    return GradientBucket(torch.cat([grads[name] for name in names]), _entries(tuple(names), sizes), index)


def _means(gradient_buckets: Sequence[GradientBucket]) -> dict[str, Tensor]:
    return {
        entry.spec.name: bucket.buffer[entry.start : entry.stop].clone()
        for bucket in gradient_buckets
        for entry in bucket.entries
    }
