"""Exact checkpoints: plain tensors, per rank, keyed by parameter name, versioned."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradwire.arena import layout_hash
from gradwire.ddp.agree import require_agreement
from gradwire.ddp.engine import Engine
from gradwire.ddp.layout import plain, settled
from gradwire.errors import RanksDisagree
from gradwire.memory import UNSENT
from gradwire.recipes import Composition, recipe

FORMAT = 5
State = Mapping[str, Any]


def save(engine: Engine) -> dict[str, Any]:
    """This rank's state; the tensors are copies."""
    planes: dict[str, dict[str, Tensor]] = {UNSENT: {}}
    for spec in engine.specs:
        for plane in engine.layout.planes_of(spec.name):
            # In the gradient's accumulating type, so that a mean over ranks is not taken in bfloat16.
            memory = engine.layout.memory(spec.name, plane).to(spec.plane_dtype, copy=True)
            planes.setdefault(plane, {})[spec.name] = spec.shaped(memory).contiguous()
    return {
        "format": FORMAT,
        "rank": engine.comm.rank,
        "world": engine.comm.world,
        "layout": layout_hash(engine.specs),
        "plan": None if engine.measuring else engine.layout.main.text,
        "why": engine.layout.main.why,
        "step": engine.step,
        "memory": planes.pop(UNSENT),
        "planes": planes,
        "kept": _kept(engine),
    }


def _kept(engine: Engine) -> dict[str, dict[str, Tensor]]:
    """Copies, by kind and parameter name, of what exchanges keep beside the planes; equal on all ranks."""
    kept: dict[str, dict[str, Tensor]] = {}
    for lane in engine.layout.lanes:
        for kind, tensors in lane.kept.committed.items():
            kept.setdefault(kind, {}).update({name: tensor.clone() for name, tensor in tensors.items()})
    return kept


def _all_planes(state: State) -> dict[str, Mapping[str, Tensor]]:
    """By plane and parameter name; what is unsent among them."""
    return {UNSENT: state["memory"], **state["planes"]}


def save_mean(engine: Engine) -> dict[str, Any]:
    """The mean memory over ranks, loadable on any rank of any world. One all-reduce per parameter."""
    state = save(engine)
    for plane in _all_planes(state).values():
        for memory in plane.values():
            memory.mul_(1.0 / engine.comm.world)
            engine.comm.all_reduce(memory.view(-1)).wait()
    return {**state, "rank": None, "world": None}


def load(engine: Engine, state: State | Sequence[State]) -> None:
    """Take up a state, on all ranks together.

    One state is this rank's own, or a mean. A list is all ranks' states of the old world: of the same
    world everybody takes his own, of another everybody starts with the mean, so that what was unsent in
    total stays the same. Raises `ValueError` when a state does not belong here, and `RanksDisagree` on
    the ranks whose state would do when another rank's does not.
    """
    mine, refusal = _vet(engine, state)
    facts = {
        "the state to load": "fits" if refusal is None else f"refused, {refusal}",
        "step": str(mine.get("step")),
        "plan": str(mine.get("plan")),
        "kind of state": "a mean" if mine.get("rank") is None else f"of {mine.get('world')} ranks",
    }
    try:
        require_agreement(facts, engine.comm)
    except RanksDisagree:
        if refusal is None:
            raise
    if refusal is not None:
        raise refusal
    _restore(engine, mine)


def _vet(engine: Engine, state: State | Sequence[State]) -> tuple[State, ValueError | None]:
    """This rank's state, or why there is none: peers wait to hear of it, so nothing is raised yet."""
    try:
        for each in [state] if isinstance(state, Mapping) else state:
            _check(engine, each)
        return _choose(engine, state), None
    except ValueError as error:
        return {}, error
    except (KeyError, TypeError, AttributeError) as error:
        return {}, ValueError(f"this is no state of gradwire: {error!r}")


def _check(engine: Engine, state: State) -> None:
    if state.get("format") != FORMAT:
        raise ValueError(f"state has format {state.get('format')!r}; this version reads {FORMAT}")
    if state["layout"] != layout_hash(engine.specs):
        raise ValueError(_different_model(engine, state))
    if not {"rank", "world", "plan", "why", "step", "planes", "kept"} <= set(state):
        raise ValueError("state lacks some of rank, world, plan, why, step, planes and kept")
    shapes = {spec.name: spec.shape for spec in engine.specs}
    for plane in _all_planes(state).values():
        for name, memory in plane.items():
            if tuple(memory.shape) != shapes[name]:
                raise ValueError(f"memory of {name!r} has shape {tuple(memory.shape)}, not {shapes[name]}")
    _check_fit(engine, state)


def _check_fit(engine: Engine, state: State) -> None:
    """Whether the state's plan may run here, and has a place for all that was remembered."""
    measuring = state["plan"] is None
    composition = (settled(engine.recipe) or plain()) if measuring else _planned(state)
    layout = engine.layout_of(composition, torch.device("meta"))
    engine.check_layout(layout)
    for plane, memories in _all_planes(state).items():
        for name in memories:
            if plane not in layout.planes_of(name):
                raise ValueError(
                    f"state has {plane} memory for {name!r}, sent otherwise now; keep the policy"
                )
    for kind, tensors in state["kept"].items():
        for name in tensors:
            if name not in layout.slots:
                raise ValueError(f"state has {kind} for {name!r}, sent otherwise now; keep the policy")


def _planned(state: State) -> Composition:
    composition = recipe(state["plan"]).build()
    if not isinstance(composition, Composition):
        raise ValueError(f"the state's plan {state['plan']!r} is none that was decided on")
    return composition


def _restore(engine: Engine, state: State) -> None:
    if state["plan"] is None:
        engine.start_over()
    else:
        # A loaded state compresses from its first step on, with the plan it was saved under.
        composition = _planned(state)
        engine.forget()
        engine.install(replace(composition, why=f"loaded; {state['why']}"))
    specs = {spec.name: spec for spec in engine.specs}
    for plane, memories in _all_planes(state).items():
        for name, memory in memories.items():
            specs[name].shaped(engine.layout.memory(name, plane)).copy_(memory)
    for kind, tensors in state["kept"].items():
        for name, tensor in tensors.items():
            engine.layout.slots[name][0].kept.put(kind, name, tensor.clone())
    for lane in engine.layout.lanes:
        lane.kept.commit()
    engine.step = state["step"]
    # Last of all: whoever has made warnings errors, here alone perhaps, has nothing half loaded.
    if state["plan"] is not None:
        _warn_of_another_recipe(engine, engine.layout.main.text)


def _warn_of_another_recipe(engine: Engine, plan: str) -> None:
    asked = settled(engine.recipe)
    if asked is not None and asked.text != plan:
        warnings.warn(
            f"the loaded state goes on with {plan}, not with the recipe {asked.text} given to attach",
            stacklevel=2,
        )


def _choose(engine: Engine, state: State | Sequence[State]) -> State:
    if isinstance(state, Mapping):
        if state["world"] is None or (state["world"], state["rank"]) == (engine.comm.world, engine.comm.rank):
            return state
        raise ValueError(
            f"state is rank {state['rank']}'s of {state['world']}, this is rank {engine.comm.rank} of "
            f"{engine.comm.world}; load its own, a list of all ranks', or a state_dict(kind='mean')"
        )
    if any(each["rank"] is None for each in state):
        raise ValueError("a mean is loaded alone: a list holds the state of every rank")
    states = sorted(state, key=lambda each: int(each["rank"]))
    if not states:
        raise ValueError("the list of states is empty: it holds the state of every old rank")
    world = states[0]["world"]
    if [each["rank"] for each in states] != list(range(world)):
        raise ValueError(f"need the states of all {world} old ranks, got ranks {[s['rank'] for s in states]}")
    if world == engine.comm.world:
        return states[engine.comm.rank]
    if len({(each["step"], each["plan"], each["layout"]) for each in states}) > 1:
        raise ValueError("the states are of different steps, plans or models")
    planes = {plane: _mean([each["planes"][plane] for each in states]) for plane in states[0]["planes"]}
    return {**states[0], "memory": _mean([each["memory"] for each in states]), "planes": planes}


def _mean(memories: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([m[name] for m in memories]).mean(0) for name in memories[0]}


def _different_model(engine: Engine, state: State) -> str:
    mine, theirs = {spec.name for spec in engine.specs}, set(state["memory"])
    unknown = sorted(theirs - mine)[:3]
    hint = f"; it has {', '.join(unknown)}, which this model has not" if unknown else ""
    return f"state belongs to a model with other parameter names, shapes, dtypes or order{hint}"
