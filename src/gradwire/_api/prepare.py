"""Kernels are compiled before a step calls them, while no other rank waits.

On the CPU they are those whose contracts this process has imported: a recipe imports what its parts call when
it is built, so none keeps a list. Another recipe that the process has built may have imported more.

On a device the compiled code also depends on sizes and addresses. So a step is rehearsed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.comm import Comm
from gradwire.control.kernels import KernelsController
from gradwire.environment import compiles_first
from gradwire.errors import WireError
from gradwire.exchange.base import CYCLE, STEADY
from gradwire.granularity import ON_DEVICE
from gradwire.kernels import compiler
from gradwire.kernels.flagged import poison, zero_idle
from gradwire.kernels.joined import join, split
from gradwire.kernels.pieces import Pieces
from gradwire.measure.clock import now_s
from gradwire.measure.probe import slowest
from gradwire.memory import UNSENT, Gradients
from gradwire.placement import Device
from gradwire.recipes import Recipe
from gradwire.recipes.parse import short
from gradwire.step.ahead import CodedBuffer
from gradwire.step.environment import Controller, ReducerEnvironment
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.layout import Layout, build, only_compresses
from gradwire.step.marks import Marks
from gradwire.unit.context import Coded, ExchangeContext
from gradwire.unit.parameters import ParameterSpec, Unit

if TYPE_CHECKING:  # loaded where something is compiled beside training
    from gradwire.kernels.background import BackgroundCompilation

_LOG = logging.getLogger("gradwire")

_ENOUGH = 1 << 20
"""Elements that are compensated in a rehearsal at most: how many there are changes no kernel."""
_LOOK_S = 0.05
"""Time between two looks whether kernels are there."""
LONG_S = 2.0
"""Compiling for longer than that is worth a line that shows by default, since others may wait for it."""


def prepare_for(layout: Layout, memory: Device, *, rank: int, world: int) -> None:
    """Have the kernels that `layout` calls, with its `memory` on the CPU or on a device. Raises nothing.

    `world` ranks exchange gradients.
    """
    if memory.is_host:
        prepare(layout.main.text, _subjects([layout]), rank)
    elif not any(flat_buffer.x.is_meta for flat_buffer in layout.flat_buffers):  # else it is not running yet
        _rehearse_timed(layout, world)


class PreparedBeside:
    """Kernels of rounds: another process compiles them while the replica takes local steps.

    Nothing dense travels instead: a round may be a hundred times as long without its recipe.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._prepare = partial(prepare_for, rank=rank, world=world)
        self._begun: list[tuple[Layout, Device, BackgroundCompilation]] = []

    def begin(self, layout: Layout, memory: Device) -> None:
        """Have the kernels as `prepare_for`, or let them be compiled until `wait`. Raises nothing."""
        begun = compilation_for(_subjects([layout])) if memory.is_host else None
        if begun is None:
            self._prepare(layout, memory)
        else:
            self._begun.append((layout, memory, begun))

    def wait(self) -> None:
        """Wait until the kernels are there, and load them. A round of the others waits meanwhile."""
        start_s, never = now_s(), threading.Event()
        while self._begun:
            layout, memory, begun = self._begun[0]
            while not begun.has_ended():
                never.wait(_LOOK_S)
            del self._begun[0]
            self._prepare(layout, memory)
            if (took_s := now_s() - start_s) > LONG_S:
                why = "`gradwire warmup` compiles them beforehand"
                _LOG.warning(
                    "a round waited %.0f s for kernels of %s; %s", took_s, short(layout.main.text), why
                )


def awaited(chosen: Recipe, specs: Sequence[ParameterSpec], env: ReducerEnvironment) -> Controller | None:
    """The controller of dense steps in which kernels for `chosen` are compiled beside training; `None` if
    `chosen` begins at once. A collective, unless there is no other rank, or dense gradients may not replace
    what `chosen` makes of them.

    If one rank lacks a kernel, dense steps begin on all of them. Kernels of a device are not awaited.
    """
    asked = chosen.build()
    about, candidates = (None, ()) if asked.next is None else (asked.next.about, asked.next.candidates)
    may_run = [asked, *([] if about is None else [about])]
    if candidates:
        from gradwire.control.auto import built  # loaded by what chooses among recipes

        may_run += built(candidates).values()
    given = env.policy, torch.device("meta"), env.world, env.memory_dtype, env.tuning
    layouts = [build(specs, each, *given) for each in may_run]
    if env.alone or not all(map(only_compresses, layouts)):
        return None
    subjects = _subjects([each for each in layouts if env.placed(each).memory.is_host])
    has_kernels = compiled_beside(subjects, env.control)
    return None if has_kernels is None else KernelsController(asked, has_kernels)


def compiled_beside(subjects: Collection[str], control: Comm) -> Callable[[], bool] | None:
    """Let another process compile the kernels of `subjects`, on each machine that lacks some. Returns whether
    nothing more comes on this rank's machine, as a function; `None` if no rank lacks any. A collective over
    `control`.
    """
    begun = compilation_for(subjects)
    if slowest(control, [float(begun is not None)]) == [0.0]:
        return None
    return (lambda: True) if begun is None else begun.has_ended


def compilation_for(subjects: Collection[str]) -> BackgroundCompilation | None:
    """Compilation of the kernels of `subjects` for the CPU; `None` if they are there, or have to be compiled
    here. Raises nothing: peers wait.
    """
    try:
        if compiles_first() or os.name != "posix" or not compiler.lacking(subjects):
            return None
        from gradwire.kernels.background import BackgroundCompilation  # which needs POSIX
        from gradwire.kernels.cpu.cache import writable

        folder = writable()
        begun = None if folder is None else BackgroundCompilation(subjects, folder, now_s)
        return None if begun is None or begun.has_ended() else begun
    except Exception as error:  # where they are compiled instead, all ranks hear of what is wrong
        _LOG.info("kernels are compiled before the first step: %r", error)
        return None


def _subjects(layouts: Sequence[Layout]) -> frozenset[str]:
    """Kernels that `layouts` may call: those that have been imported, and none for dense gradients. Each
    reducer imports the one that compensates, which only layouts with flat buffers call.
    """
    if all(each.is_dense for each in layouts):
        return frozenset()
    return compiler.imported() - (set() if any(each.flat_buffers for each in layouts) else {"compensation"})


def _rehearse_timed(layout: Layout, world: int) -> None:
    start_s = now_s()
    try:
        rehearse(layout, world)
    except Exception as error:
        _LOG.warning("kernels of %s could not be prepared: %r", short(layout.main.text), error)
    if (took_s := now_s() - start_s) > LONG_S:
        _LOG.warning("preparing kernels for %s took %.0f s", short(layout.main.text), took_s)


def rehearse(layout: Layout, world: int) -> None:
    """Compensate zeros and exchange all units of `layout` with peers that only echo. Memory stays as it is.

    The working planes, which are written, mean nothing between steps.
    """
    from gradwire.measure.codec import EchoComm  # loaded where a device is

    for flat_buffer in layout.flat_buffers:
        marks = Marks(layout.flat_buffers, flat_buffer.x.device)
        mark = marks.begin()
        slot = max(flat_buffer.slots, key=lambda slot: slot.spec.numel)
        size = min(slot.spec.numel, _ENOUGH)
        bucket = torch.zeros(size + 1, dtype=slot.spec.dtype, device=flat_buffer.x.device)
        for offset in (1, 0):  # buckets are loaded as vectors where their parameters lie so
            grads = Gradients(bucket, Pieces([(slot.start, offset, size)]))
            seen = flat_buffer.compensate(grads, STEADY, world)
            if isinstance(seen.idle, Tensor):
                zero_idle(flat_buffer.x, grads.pieces, seen.idle)
        coded = _rehearse_marking(layout, flat_buffer, world, marks)
        poison([flat_buffer.x], mark)
        flat = torch.empty(2, dtype=torch.float32, device=flat_buffer.x.device)
        join([bucket[:1]], flat, 1.0, mark)
        split(flat, [bucket[:1]], mark)
        flat_buffer.x.copy_(
            flat_buffer.committed[UNSENT]
        ) if UNSENT in flat_buffer.committed else flat_buffer.x.zero_()
        try:
            for unit in flat_buffer.units:
                # In a bucket, means lie anywhere; one unit shows what that makes of the code.
                for offset in (0, 1) if unit.index == 0 else (0,):
                    for ranks in (world, 1):  # some decode nothing that equals their own
                        with suppress(WireError):
                            _rehearse_unit(flat_buffer, unit, EchoComm(ranks), offset, mark)
                            break
            if coded is not None:
                unit = flat_buffer.units[0]
                place = torch.empty(unit.numel, dtype=slot.spec.dtype, device=flat_buffer.x.device)
                _rehearse_unit(flat_buffer, unit, EchoComm(world), 0, mark, coded.unit(unit, [place], 1.0))
        finally:
            if coded is not None:
                coded.close()
            flat_buffer.kept.discard()


def _rehearse_marking(
    layout: Layout, flat_buffer: FlatBuffer, world: int, marks: Marks
) -> CodedBuffer | None:
    """Compensate a small parameter as in a step that the host does not wait for. If an encoder does that in
    the same pass, use it and return it."""
    if not flat_buffer.adds:
        return None
    coded = layout.coded(flat_buffer, world, ON_DEVICE)
    # Planes are loaded as vectors where parameters lie so.
    full = [slot for slot in flat_buffer.slots if slot.spec.numel] or list(flat_buffer.slots)
    slot = min(full, key=lambda slot: (slot.start % 4 or slot.spec.numel % 4, slot.spec.numel))
    bucket = torch.zeros(slot.spec.numel + 1, dtype=slot.spec.dtype, device=flat_buffer.x.device)
    for offset in (1, 0):
        grads = Gradients(bucket, Pieces([(slot.start, offset, slot.spec.numel)]))
        compensate = flat_buffer.compensate_marked if coded is None else coded.compensate
        compensate(grads, flat_buffer.numbers_of([slot]), STEADY, marks.values)
    return coded


def _rehearse_unit(
    flat_buffer: FlatBuffer, unit: Unit, comm: Comm, offset: int, mark: Tensor, coded: Coded | None = None
) -> None:
    x = flat_buffer.x[unit.start : unit.stop]
    mean = torch.empty(offset + x.numel(), dtype=x.dtype, device=x.device)[offset:]
    ctx = ExchangeContext(
        STEADY,
        unit.index,
        comm.rank,
        comm.world,
        flat_buffer=unit.flat_buffer,
        parts=unit.parts,
        narrow=flat_buffer.narrow,
        unsent=flat_buffer.committed[UNSENT][unit.start : unit.stop]
        if UNSENT in flat_buffer.committed
        else None,
        kept=flat_buffer.kept,
        see=lambda _sound, _complaint: None,
        mark=mark,
        granularity=ON_DEVICE,
        coded=coded,
        kernels=flat_buffer.kernels,
    )
    for step in range(STEADY, STEADY + CYCLE):  # units may rest
        now = replace(ctx, step=step)
        if flat_buffer.exchange.rounds(x.numel(), x.dtype, now):
            flat_buffer.exchange.start(x, mean, comm, now)()
            return


def prepare(text: str, subjects: Collection[str], rank: int, long_s: float = LONG_S) -> None:
    """Have the kernels of `subjects`, for what is called `text`; log what has to be compiled.

    The first line is at INFO, those after `long_s` at WARNING. Raises nothing: peers would wait for this
    rank's collectives. A kernel that cannot be had fails again where a step calls it, and from there all
    ranks hear of it.
    """
    if not subjects:
        return  # and Numba is not loaded
    before_s = compiler.compiled_s()
    why = "other ranks may wait; `gradwire warmup` does it beforehand"
    told: set[int] = set()

    def say() -> None:
        level = logging.WARNING if compiler.compiled_s() - before_s > long_s else logging.INFO
        if level not in told:
            told.add(level)
            _LOG.log(level, "compiling kernels for %s, once on this machine; %s", short(text), why)

    try:
        with compiler.announced(say):
            compiler.prepare(subjects, turn=rank)
    except Exception as error:
        _LOG.warning("kernels of %s could not be prepared: %r", text, error)
    took_s = compiler.compiled_s() - before_s
    if took_s > long_s:
        _LOG.warning("compiling kernels for %s took %.0f s; %s", short(text), took_s, why)
