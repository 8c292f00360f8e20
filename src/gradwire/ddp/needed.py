"""Which kernels something may call: those whose wrappers its modules have imported.

So nobody keeps a list of who calls what, and nothing is missing from it; it may name more than are called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, ModuleType

from gradwire.ddp.layout import Layout

_OURS = "gradwire."
_KERNELS = "gradwire.kernels."


def kernels_for(layout: Layout) -> frozenset[str]:
    """What `kernels_of` finds for everything that runs in `layout`."""
    # Only lanes are folded, though any exchange may have a memory.
    beside = kernels_of(*layout.direct.values()) - {"folding"}
    return beside | kernels_of([lane.exchange for lane in layout.lanes], layout.main.watch)


def kernels_of(*objects: object) -> frozenset[str]:
    """The modules of `gradwire.kernels` that the code of `objects`, and of all they hold, may call.

    By name, as `gradwire.kernels.prepare` takes them.

    >>> from gradwire.recipes import recipe
    >>> sorted(kernels_of(recipe("int4").build().exchange) & {"blocks", "folding", "topk"})
    ['blocks', 'folding']
    """
    found: set[str] = set()
    seen: set[str] = set()
    left = {name for each in objects for name in _homes(each)}
    while left:
        name = left.pop()
        seen.add(name)
        if name.startswith(_KERNELS):
            found.add(name.removeprefix(_KERNELS).split(".")[0])
            continue
        left.update(other for other in _imported(name) if other.startswith(_OURS) and other not in seen)
    return frozenset(found)


def _homes(held: object) -> Iterator[str]:
    """The modules in which the types and functions of `held`, and of what it holds, are written."""
    if isinstance(held, partial):
        yield from _homes((held.func, held.args, held.keywords))
    elif isinstance(held, FunctionType | type):
        yield held.__module__
    elif isinstance(held, Mapping):
        yield from _homes(tuple(held.values()))
    elif isinstance(held, tuple | list | frozenset | set):
        for each in held:
            yield from _homes(each)
    else:
        yield type(held).__module__
        if is_dataclass(held):
            for field in fields(held):
                yield from _homes(getattr(held, field.name))


def _imported(module: str) -> Iterator[str]:
    """The modules that what stands in a module comes from."""
    for value in list(vars(sys.modules[module]).values()) if module in sys.modules else ():
        if isinstance(value, ModuleType):
            yield value.__name__
        else:
            yield getattr(value, "__module__", None) or ""
