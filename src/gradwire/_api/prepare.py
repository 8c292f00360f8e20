"""Kernels are compiled before a step calls them, while no other rank waits.

On the CPU they are those whose contracts the modules of a recipe have imported. This follows from the code,
so that no recipe keeps a list of what its parts call. It may name more kernels than are called. Kernels that
functions import inside are not found; they are compiled when they are called.

On a device the compiled code also depends on sizes and addresses. So a step is rehearsed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import MethodType, ModuleType

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.comm import Comm
from gradwire.errors import WireError
from gradwire.exchange.base import CYCLE, STEADY
from gradwire.granularity import ON_DEVICE
from gradwire.kernels import Pieces, poison, zero_idle
from gradwire.measure.clock import now_s
from gradwire.memory import UNSENT, Gradients
from gradwire.placement import Device
from gradwire.step.arena import Lane, Unit
from gradwire.step.context import ExchangeContext
from gradwire.step.layout import Layout

_LOG = logging.getLogger("gradwire")
_KERNELS = "gradwire.kernels."
_STRANGERS = sys.stdlib_module_names | {"torch", "numpy"}
_PLAIN = (str, bytes, int, float, complex, type(None), Tensor, torch.dtype, ModuleType)


_ENOUGH = 1 << 20
"""Elements that are folded in a rehearsal at most: how many there are changes no kernel."""
LONG_S = 2.0
"""Compiling for longer than that is worth a line that shows by default, since others may wait for it."""


def prepare_for(layout: Layout, memory: Device, *, rank: int, world: int) -> None:
    """Have the kernels that `layout` calls, with its `memory` on the CPU or on a device. Raises nothing.

    `world` ranks exchange gradients.
    """
    if memory.is_host:
        prepare(layout.main.text, lambda: kernels_for(layout), rank)
    elif not any(lane.x.is_meta for lane in layout.lanes):  # else it is not running yet
        _rehearse_timed(layout, world)


def _rehearse_timed(layout: Layout, world: int) -> None:
    start_s = now_s()
    try:
        rehearse(layout, world)
    except Exception as error:
        _LOG.warning("kernels of %s could not be prepared: %r", layout.main.text, error)
    if (took_s := now_s() - start_s) > LONG_S:
        _LOG.warning("preparing kernels for %s took %.0f s", layout.main.text, took_s)


def rehearse(layout: Layout, world: int) -> None:
    """Fold zeros and exchange all units of `layout` with peers that only echo. Memory stays as it is.

    The working planes, which are written, mean nothing between steps.
    """
    from gradwire.measure.codec import EchoComm  # loaded where a device is

    for lane in layout.lanes:
        slot = max(lane.slots, key=lambda slot: slot.spec.numel)
        size = min(slot.spec.numel, _ENOUGH)
        bucket = torch.zeros(size + 1, dtype=slot.spec.dtype, device=lane.x.device)
        for offset in (1, 0):  # buckets are loaded as vectors where their parameters lie so
            grads = Gradients(bucket, Pieces([(slot.start, offset, size)]))
            seen = lane.fold(grads, STEADY, world)
            if isinstance(seen.idle, Tensor):
                zero_idle(lane.x, grads.pieces, seen.idle)
        poison([lane.x], torch.zeros((), dtype=torch.bool, device=lane.x.device))
        lane.x.copy_(lane.committed[UNSENT]) if UNSENT in lane.committed else lane.x.zero_()
        try:
            for unit in lane.units:
                # In a bucket, means lie anywhere; one unit shows what that makes of the code.
                for offset in (0, 1) if unit.index == 0 else (0,):
                    for ranks in (world, 1):  # some decode nothing that equals their own
                        with suppress(WireError):
                            _rehearse_unit(lane, unit, EchoComm(ranks), offset)
                            break
        finally:
            lane.kept.discard()


def _rehearse_unit(lane: Lane, unit: Unit, comm: Comm, offset: int) -> None:
    x = lane.x[unit.start : unit.stop]
    mean = torch.empty(offset + x.numel(), dtype=x.dtype, device=x.device)[offset:]
    ctx = ExchangeContext(
        STEADY,
        unit.index,
        comm.rank,
        comm.world,
        lane=unit.lane,
        parts=unit.parts,
        narrow=lane.narrow,
        unsent=lane.committed[UNSENT][unit.start : unit.stop] if UNSENT in lane.committed else None,
        kept=lane.kept,
        see=lambda _sound, _complaint: None,
        granularity=ON_DEVICE,
    )
    for step in range(STEADY, STEADY + CYCLE):  # units may rest
        now = replace(ctx, step=step)
        if lane.exchange.rounds(x.numel(), x.dtype, now):
            lane.exchange.start(x, mean, comm, now)()
            return


def prepare(text: str, names: Callable[[], Collection[str]], rank: int, long_s: float = LONG_S) -> None:
    """Have the kernels of the modules `names()`, for what is called `text`; log what has to be compiled.

    The first line is at INFO, those after `long_s` at WARNING. Raises nothing: peers would wait for this
    rank's collectives. A kernel that cannot be had fails again where a step calls it, and from there all
    ranks hear of it.
    """
    before_s = kernels.compiled_s()
    why = "other ranks may wait; `gradwire warmup` does it beforehand"
    told: set[int] = set()

    def say() -> None:
        level = logging.WARNING if kernels.compiled_s() - before_s > long_s else logging.INFO
        if level not in told:
            told.add(level)
            _LOG.log(level, "compiling kernels for %s; %s", text, why)

    try:
        with kernels.announced(say):
            kernels.prepare(names(), turn=rank)
    except Exception as error:
        _LOG.warning("kernels of %s could not be prepared: %r", text, error)
    took_s = kernels.compiled_s() - before_s
    if took_s > long_s:
        _LOG.warning("compiling kernels for %s took %.0f s; %s", text, took_s, why)


def kernels_for(layout: Layout) -> frozenset[str]:
    """The kernels, by `kernels_of`, of everything that runs in `layout`."""
    # Only lanes are folded, though any exchange may have a memory.
    beside = kernels_of(*layout.direct.values()) - {"folding"}
    looks = None if layout.main.watch is None else layout.main.watch.look  # a judge sees numbers only
    return beside | kernels_of([lane.exchange for lane in layout.lanes], looks)


def kernels_of(*objects: object) -> frozenset[str]:
    """The subjects of the kernels that the code of `objects`, and of all they hold, may call.

    By name, as `gradwire.kernels.prepare` takes them: "topk" for what imports a contract of
    `reference/topk.py`.

    >>> from gradwire.recipes import recipe
    >>> sorted(kernels_of(recipe("int4").build().exchange) & {"blocks", "folding", "topk"})
    ['blocks', 'folding']
    """
    found: set[str] = set()
    seen: set[str] = set()
    left = _homes(objects)
    followed = {_root(name) for name in left} - _STRANGERS | {"gradwire"}
    while left:
        name = left.pop()
        seen.add(name)
        if name.startswith(_KERNELS):
            found.add(name.rsplit(".", 1)[1])
        else:
            left |= {other for other in _imported(name) if _root(other) in followed} - seen
    return frozenset(found)


def _homes(objects: Iterable[object]) -> set[str]:
    """The modules in which the types and functions of `objects`, and of all that these hold, are written."""
    left, seen, homes = list(objects), set[int](), set[str]()
    while left:
        held = left.pop()
        if id(held) in seen or isinstance(held, _PLAIN):
            continue
        seen.add(id(held))
        homes |= {
            _home(held),
            *(_home(base) for base in (held if isinstance(held, type) else type(held)).__mro__),
        }
        left += _held_by(held)
    return homes


def _held_by(held: object) -> list[object]:
    """The objects to look at beside `held` itself."""
    match held:
        case Mapping():
            return list(held.values())
        case tuple() | list() | set() | frozenset():
            return list(held)
        case partial():
            return [held.func, held.args, held.keywords]
        case MethodType():
            return [held.__self__, held.__func__]
    if isinstance(held, type) or _root(_home(type(held))) in _STRANGERS:
        return []
    if is_dataclass(held):
        return [getattr(held, each.name, None) for each in fields(held)]
    return list(vars(held).values()) if hasattr(held, "__dict__") else []


def _imported(module: str) -> set[str]:
    """The modules that what stands in a module comes from."""
    values = list(vars(sys.modules[module]).values()) if module in sys.modules else []
    return {value.__name__ if isinstance(value, ModuleType) else _home(value) for value in values}


def _home(held: object) -> str:
    """The module that `held`, a function or type, or else its type, is written in."""
    name = getattr(held, "__module__", None)
    return name if isinstance(name, str) else type(held).__module__


def _root(module: str) -> str:
    return module.split(".")[0]
