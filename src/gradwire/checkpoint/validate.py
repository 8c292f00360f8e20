"""Validation of a state before it is loaded: is it complete and undamaged, and does it fit this model?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradwire.exchange.state import complaint
from gradwire.kernels.range import LARGEST_SUM
from gradwire.memory import UNSENT
from gradwire.recipes import Composition, recipe
from gradwire.recipes.dense import dense
from gradwire.step.installed import META, InstalledRecipe
from gradwire.step.layout import Layout
from gradwire.step.shards import shards_of
from gradwire.unit.parameters import ParameterSpec, layout_hash

FORMAT = 6
READABLE = (5, FORMAT)
"""Formats that can be read. Formats 5 and 6 have equal contents per rank; since 6 they are under a key that
names the rank."""
State = Mapping[str, Any]

_KEYS = {"rank", "world", "layout", "plan", "why", "step", "memory", "planes", "kept"}
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def all_planes(state: State) -> dict[str, Mapping[str, Tensor]]:
    """Tensors by plane and parameter name; the unsent gradient is one of the planes."""
    return {UNSENT: state["memory"], **state["planes"]}


def described(reducer: InstalledRecipe, state: State) -> tuple[ParameterSpec, ...]:
    """The parameters, or shards of them, that a state holds memory for.

    FSDP cuts parameters differently from nodes. If neither layout's hash equals the state's, the shapes of
    the memory decide.
    """
    shard = state.get("shard")
    parts = 1 if shard is None else shard[1]
    if shard is not None and not (_is_count(shard[0]) and _is_count(parts) and 0 <= shard[0] < parts):
        raise ValueError(f"state names the shard {shard!r}, which is not a shard")
    whole, memory = [spec.whole for spec in reducer.specs], state.get("memory", {})

    def likeness(held: tuple[ParameterSpec, ...]) -> tuple[bool, int]:
        alike = [getattr(memory.get(spec.name), "shape", None) == spec.shape for spec in held]
        return layout_hash(held) == state["layout"], sum(alike)

    return max((shards_of(whole, parts, by_rows=each) for each in (False, True)), key=likeness)


def _is_of(held: Sequence[ParameterSpec], state: State) -> bool:
    """True if `state` is of these parameters or shards. Shards of different parameters may have equal
    shapes.
    """
    shapes = state.get("shapes") or {}
    return state["layout"] == layout_hash(held) and all(
        tuple(shapes.get(spec.name, spec.whole.shape)) == spec.whole.shape for spec in held
    )


def composition_of(reducer: InstalledRecipe, state: State) -> Composition:
    """The composition that a state, or its entry "following", resumes; the reducer's own if nothing was
    decided yet.
    """
    asked, stays = reducer.recipe.build(), state.get("stays", False)  # older states lack it
    if state["plan"] is None:
        return asked
    if asked.next is None and asked.text == state["plan"]:  # a user's own has no other place to be found
        return replace(asked, stays=stays)
    composition = replace(recipe(state["plan"]).build(), stays=stays)
    if composition.next is not None:
        raise ValueError(f"the state's plan {state['plan']!r} is not the text of a decision")
    if asked.next is None or composition.watch is not None or stays:
        return composition
    return asked.next.resume(composition)


def validate(reducer: InstalledRecipe, state: State) -> None:
    """Raise `ValueError` unless `state` is whole, undamaged, and has a place here; changes nothing.

    Any other exception, raised by objects of unexpected types, means the same.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"this is not a state of gradwire, but a {type(state).__name__}")
    if state.get("format") not in READABLE or isinstance(state["format"], bool):
        raise ValueError(_unreadable(state.get("format")))
    held = described(reducer, state)
    if not _is_of(held, state):
        raise ValueError(_different_model(reducer, state))
    if lacking := sorted(_KEYS - set(state)):
        raise ValueError(f"state lacks {', '.join(lacking)}")
    _check_numbers(state)
    for key, (is_right, what) in _LATER.items():
        if key in state and not is_right(state[key]):
            raise ValueError(f"the entry {key!r} of the state is not {what}")
    if (following := state.get("following")) is not None:
        reducer.env.check(reducer.layout_of(composition_of(reducer, following), META))
    layout = reducer.layout_of(composition_of(reducer, state), META)
    reducer.env.check(layout)
    _check_places(layout, _remembering(reducer, state), state)
    specs = {spec.name: spec for spec in held}
    for plane, memories in all_planes(state).items():
        for name, memory in memories.items():
            _check_memory(f"{plane} memory of {name!r}", memory, specs[name].shape, specs[name].plane_dtype)
    for kind, tensors in state["kept"].items():
        for name, tensor in tensors.items():
            _check_plain(f"{kind} of {name!r}", tensor)
            if (wrong := complaint(kind, tensor, specs[name].shape)) is not None:
                raise ValueError(f"{kind} of {name!r} {wrong}")


def _remembering(reducer: InstalledRecipe, state: State) -> Layout:
    """The layout with which this model would have saved such a state.

    During dense steps that measure, only parameters with a recipe of their own in the policy have memory.
    """
    return reducer.layout_of(dense() if state["plan"] is None else composition_of(reducer, state), META)


def _remembered(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Planes of each parameter that has any."""
    return {name: planes for name in layout.slots if (planes := tuple(layout.planes_of(name)))}


def fitted(reducer: InstalledRecipe, state: State) -> tuple[State, frozenset[str]]:
    """The part of `state` that this model has parameters for, and the names that only one of the two has.

    Parameters match by name and shape; shards also by the shape of the whole parameter. A parameter that the
    state lacks starts with zero memory. An older state of shards, which does not tell their shapes, is
    returned unchanged.
    """
    held, shapes = described(reducer, state), state.get("shapes")
    is_cut = state.get("shard") is not None
    if _is_of(held, state) or (is_cut and shapes is None):
        return state, frozenset()
    specs, found = {spec.name: spec for spec in held}, all_planes(state)
    wanted = _remembered(_remembering(reducer, state))

    def is_same(name: str, memory: Tensor) -> bool:
        whole = specs[name].whole.shape if shapes is None else tuple(shapes.get(name, ()))
        return memory.shape == specs[name].shape and whole == specs[name].whole.shape

    own: dict[str, dict[str, Tensor]] = {
        plane: {name: each for name, each in of.items() if name in specs and is_same(name, each)}
        for plane, of in found.items()
    }
    fits = {name for name, planes in wanted.items() if all(name in own.get(each, ()) for each in planes)}
    made: dict[str, dict[str, Tensor]] = {plane: {} for plane in found}
    for name, planes in wanted.items():
        for plane in planes:
            empty = torch.zeros(specs[name].shape, dtype=specs[name].plane_dtype, device="cpu")
            made.setdefault(plane, {})[name] = own[plane][name] if name in fits else empty
    changed = set(wanted).union(*found.values()) - fits
    kept = {
        kind: {name: each for name, each in tensors.items() if name in fits}
        for kind, tensors in state["kept"].items()
    }
    fresh = {"layout": layout_hash(held), "memory": made.pop(UNSENT), "planes": made}
    if is_cut:
        fresh["shapes"] = {name: spec.whole.shape for name, spec in specs.items()}
    return {**state, **fresh, "kept": kept}, frozenset(changed)


def _check_numbers(state: State) -> None:
    rank, world = state["rank"], state["world"]
    known = _is_count(rank) and _is_count(world) and rank < world
    if not (known or (rank is None and world is None)):
        raise ValueError(f"state names rank {rank!r} of {world!r}, which is not a rank")
    if not _is_count(state["step"]):
        raise ValueError(f"state names step {state['step']!r}, which is not a step")
    stepped = state.get("stepped", [])
    if not isinstance(stepped, list) or not all(isinstance(each, str) for each in stepped):
        raise ValueError(f"state has {stepped!r} as the names of stepped parameters, not a list of names")
    if not isinstance(state["plan"], str | None) or not isinstance(state["why"], str):
        raise ValueError(f"state has the plan {state['plan']!r} because of {state['why']!r}: not texts")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


_Check = Callable[[Any], bool]


def _is(kind: type) -> _Check:
    return lambda value: type(value) is kind


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _maybe(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _either(*checks: _Check) -> _Check:
    return lambda value: any(check(value) for check in checks)


def _several(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _row(*checks: _Check) -> _Check:
    def is_right(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(checks)
            and all(check(each) for check, each in zip(checks, value, strict=True))
        )

    return is_right


def _entries(**checks: _Check) -> _Check:
    return lambda value: (
        isinstance(value, Mapping)
        and value.keys() == checks.keys()
        and all(check(value[key]) for key, check in checks.items())
    )


_LOSSES = _row(_is_size, _is_number, _is_size)
_TREND = _entries(
    lowest=_maybe(_LOSSES), last=_maybe(_is_number), differences=_several(_is_number), above=_is_count
)
_COMPOSITION = _entries(
    lag=_entries(first=_several(_is_size), above=_is_count),
    lateness=_either(
        _entries(begun=_several(_row(*2 * [_is_size])), late=_several(_is_size)),
        # Older states also have norms of discarded gradient, here and among what waits to be told.
        _entries(begun=_several(_row(*3 * [_is_size])), late=_several(_is_size), error=_several(_is_size)),
    ),
    complained=_is(bool),
    sign=_is(str),
)
_LATER: Mapping[str, tuple[_Check, str]] = {
    "stays": (_is(bool), "True or False"),
    "following": (
        _maybe(_entries(plan=_maybe(_is(str)), why=_is(str), stays=_is(bool))),
        "a decision",
    ),
    "health": (
        _entries(
            losses=_TREND, complaints=_several(_row(_is_count, _is(str))), composition=_maybe(_COMPOSITION)
        ),
        "how training has been",
    ),
    "noted": (
        _entries(
            losses=_LOSSES,
            weighed=_maybe(_either(*(_row(_is_count, *numbers * [_is_number]) for numbers in (4, 5)))),
        ),
        "losses and norms",
    ),
}
"""Checks of entries that older states lack, and their subjects."""


def _check_places(layout: Layout, saved: Layout, state: State) -> None:
    """Raise `ValueError` unless `layout` has a place for everything in the state, and the state has all that
    `saved` remembers.
    """
    planes = all_planes(state)
    for plane, memories in planes.items():
        for name in memories:
            if plane not in layout.planes_of(name):
                raise ValueError(
                    f"state has {plane} memory for {name!r}, sent otherwise now; keep the policy"
                )
    lacking = [
        f"{plane} memory of {name!r}"
        for name in saved.slots
        for plane in saved.planes_of(name)
        if name not in planes.get(plane, ())
    ]
    if lacking:
        raise ValueError(f"state lacks {', '.join(lacking[:3])} ({len(lacking)} in all); keep the policy")
    for kind, tensors in state["kept"].items():
        for name in tensors:
            if name not in layout.slots:
                raise ValueError(f"state has {kind} for {name!r}, sent otherwise now; keep the policy")


def _check_memory(what: str, memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _check_plain(what, memory)
    if memory.dtype not in _TYPES:
        raise ValueError(f"{what} is of {memory.dtype}, not a floating type")
    if tuple(memory.shape) != shape:
        raise ValueError(f"{what} has shape {tuple(memory.shape)}, not {shape}")
    # After conversion: what float64 holds may be too large for float32.
    extremes = memory.detach().to(dtype).aminmax() if memory.numel() else ()
    if not all(abs(float(extreme)) < LARGEST_SUM for extreme in extremes):
        raise ValueError(f"{what} has NaN, Inf or numbers that are too large to be remembered")


def _check_plain(what: str, tensor: object) -> None:
    """Raise `ValueError` unless `tensor` is a dense tensor with values: not sparse, quantized or meta."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{what} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "on no device" if tensor.is_meta else tensor.layout
        raise ValueError(f"{what} is no dense tensor with values: {kind}")


def _unreadable(found: object) -> str:
    says = f"state has format {found!r}; this version reads {' and '.join(map(str, READABLE))}"
    if isinstance(found, int) and 0 < found < READABLE[0]:
        says += (
            ". An older gradwire has written it: load and save it with one that reads it, or start without"
        )
    return says


def _different_model(reducer: InstalledRecipe, state: State) -> str:
    says = "state belongs to a model with other parameter names, shapes, dtypes or order"
    theirs, mine = set(state["memory"]), set(_remembered(_remembering(reducer, state)))
    if unknown := theirs - {spec.name for spec in reducer.specs}:
        says += f"; it has {_some(unknown)}, which this model has not"
    if lacking := mine - theirs:
        says += f"; this model has {_some(lacking)}, which it has not"
    return (
        f"{says}. If parameters were frozen or thawed, missing='drop' takes up what fits; or call "
        "wire.flush() before the model is wrapped anew, and load nothing"
    )


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" ({len(names)} in all)" if len(names) > 3 else "")
