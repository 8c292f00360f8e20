"""Which kernels something may call: those whose contracts its modules have imported.

This follows from the code, so that no recipe keeps a list of what its parts call. It may name more kernels
than are called. What is imported inside functions is not found, and compiled when it is called.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import MethodType, ModuleType

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.engine.layout import Layout

_LOG = logging.getLogger("gradwire")
_KERNELS = "gradwire.kernels."
_STRANGERS = sys.stdlib_module_names | {"torch", "numpy"}
_PLAIN = (str, bytes, int, float, complex, type(None), Tensor, torch.dtype, ModuleType)


_LONG_S = 1.0
"""Compiling for longer than that is worth a line in the log."""


def prepare_for(layout: Layout, rank: int) -> None:
    """Have the kernels that `layout` may call: see `prepare`."""
    prepare(layout.main.text, lambda: kernels_for(layout), rank)


def prepare(text: str, names: Callable[[], Collection[str]], rank: int) -> None:
    """Have the kernels of the modules `names()`, for what is called `text`; log how long compiling took.

    Raises nothing: peers would wait for this rank's collectives. A kernel that cannot be had fails again
    where a step calls it, and from there all ranks hear of it.
    """
    before_s = kernels.compiled_s()
    try:
        kernels.prepare(names(), turn=rank)
    except Exception as error:
        _LOG.warning("kernels of %s could not be prepared: %r", text, error)
    took_s = kernels.compiled_s() - before_s
    if took_s > _LONG_S:
        _LOG.info("compiling kernels for %s took %.0f s; `gradwire warmup` does it beforehand", text, took_s)


def kernels_for(layout: Layout) -> frozenset[str]:
    """The kernels, by `kernels_of`, of everything that runs in `layout`."""
    # Only lanes are folded, though any exchange may have a memory.
    beside = kernels_of(*layout.direct.values()) - {"folding"}
    return beside | kernels_of([lane.exchange for lane in layout.lanes], layout.main.watch)


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
