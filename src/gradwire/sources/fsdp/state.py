"""Unsent gradient of FSDP2's scatters: plain tensors by parameter name, in the parameters' whole shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from gradwire.agreement.agree import (
    damage,
    on_all_ranks,
    require_accepted,
    require_agreement,
    require_undamaged,
)
from gradwire.checkpoint.state import Missing, Saved, single
from gradwire.comm import Comm
from gradwire.errors import GradwireWarning
from gradwire.sources.fsdp.memory import Unsent
from gradwire.sources.fsdp.traffic import Traffic

KIND = "FSDP2's own traffic"
_FORMAT = 1

State = Mapping[str, Any]


def save(traffic: Traffic, control: Comm) -> dict[str, Any]:
    """This rank's state, on the CPU. Scatters that no optimizer has used yet leave no trace in it."""
    traffic.up_to_date()
    memory = {
        name: of.whole(of.names.index(name), unsent.of_all(name)).float().cpu()
        for of, unsent in traffic.unsent
        for name in unsent.columns
    }
    return {
        "format": _FORMAT,
        "kind": KIND,
        "rank": control.rank,
        "world": control.world,
        "nodes": _nodes(traffic),
        "step": traffic.made,
        "recipe": traffic.wished.scattering.text,
        "draws": traffic.draws,
        "stepped": sorted(traffic.optimizer_log.stepped),
        "memory": memory,
    }


def save_mean(traffic: Traffic, control: Comm) -> dict[str, Any]:
    """The state with the mean over ranks of their unsent gradients, which any rank of any world can load.

    A collective: one all-reduce per parameter. Raises `PeerFailed` if another rank could not copy its memory.
    """
    state = on_all_ranks(lambda: save(traffic, control), "copy its memory", control)
    found: list[Exception | None] = []
    for memory in state["memory"].values():
        memory.div_(control.world)
        found.append(damage(control.all_reduce(memory.view(-1))))
    require_undamaged(found, control)
    return {**state, "rank": None, "world": None}


def _nodes(traffic: Traffic) -> str:
    """The ranks of every node, as one value of a state; none where each rank sends to all."""
    return "" if traffic.nodes is None else str(traffic.nodes.nodes)


def fits(traffic: Traffic, saved: Saved) -> bool:
    """True if every state is of this number of ranks, on these nodes: then each rank takes its own."""
    try:
        return all(each.get("world") is None or _is_of_this_world(traffic, each) for each in single(saved))
    except Exception:  # what is no state is refused later, with the reason, on all ranks
        return False


def _is_of_this_world(traffic: Traffic, state: State) -> bool:
    return (state["world"], state.get("nodes", "")) == (traffic.group.size(), _nodes(traffic))


def load(
    traffic: Traffic, control: Comm, saved: Saved, missing: Missing = "refuse", *, mean: bool = False
) -> None:
    """Load a state on all ranks; after an error nothing has changed on any rank. A collective over `control`.

    Args:
        traffic: receives the state.
        control: comm of all ranks.
        saved: one state, or those of several ranks.
        missing: "drop" allows states of some ranks to be missing, and parameters that the model does not
            have; their unsent gradient is lost. "refuse" raises.
        mean: whether to load the mean even if each rank has a state of its own.

    If as many ranks saved, each takes its own state; otherwise all start with the mean. Raises `ValueError`
    for a state that does not belong here, and `RanksDisagree` if another rank refuses its state or loads
    another step.
    """
    refusal: Exception | None = None
    step, kind = "none", "none"
    apply: Callable[[], None] = _nothing
    try:
        if missing not in ("refuse", "drop"):
            raise ValueError(f"missing={missing!r} is neither 'refuse' nor 'drop'")
        states = single(saved)
        chosen = _chosen(traffic, states, control, missing, mean=mean)
        memory = _fitted(traffic, chosen, missing)
        stepped = frozenset(chosen.get("stepped", traffic.optimizer_log.stepped))  # older states lack it
        rooms = traffic.make_room(traffic.wished.scattering, memory)
        step, kind = str(chosen["step"]), "a mean" if chosen["rank"] is None else "of this rank"

        def apply() -> None:
            _take_up(traffic, chosen, memory, rooms, stepped)
    except ValueError as error:
        refusal = error
    except Exception as error:  # memory that runs out, a file of something else, …
        refusal = ValueError(f"this is not a state of gradwire, or it cannot be loaded: {error!r}")
    require_accepted(refusal, control)
    require_agreement({"step": step, "kind of state": kind}, control)
    apply()


def _nothing() -> None:
    """Do nothing: no state is loaded."""


def _chosen(
    traffic: Traffic, states: Sequence[State], control: Comm, missing: Missing, *, mean: bool
) -> State:
    """The state to go on from: this rank's own, a mean, or the mean of all. The arguments are those of
    `load`. Raises `ValueError` if the states do not belong here or are incomplete.
    """
    for each in states:
        if each.get("kind") != KIND:
            raise ValueError(
                "the state is not of FSDP2's own traffic: it was saved of a model attached in another way"
            )
        if each.get("format") != _FORMAT:
            raise ValueError(f"the state has format {each.get('format')}, and this version reads {_FORMAT}")
    if len(states) == 1 and states[0]["rank"] is None:
        return states[0]
    worlds = {each["world"] for each in states}
    if len(worlds) != 1 or None in worlds:
        raise ValueError("the states are of several saves")
    [world] = worlds
    own = [each for each in states if each["rank"] == control.rank]
    lacking = sorted(set(range(world)) - {each["rank"] for each in states})
    # Of a list that has lost some, all ranks take the mean, those whose own is left, too.
    is_whole = len(states) == 1 or not lacking
    if own and _is_of_this_world(traffic, own[0]) and is_whole and not mean:
        return own[0]
    if lacking and (missing == "refuse" or len(states) == 1):
        raise ValueError(
            f"states of ranks {lacking} of {world} are missing: in another world, or on other nodes, each "
            "rank needs all of them. missing='drop' goes on with the mean of the others"
        )
    steps = {each["step"] for each in states}
    if len(steps) > 1:
        raise ValueError(f"the states are of several steps, {sorted(steps)}")
    names = states[0]["memory"]
    memory = {name: torch.stack([each["memory"][name] for each in states]).mean(0) for name in names}
    return {**states[0], "rank": None, "world": None, "memory": memory}


def _fitted(traffic: Traffic, state: State, missing: Missing) -> dict[str, Tensor]:
    """Unsent gradients in `state` of the present parameters, by name. If others are in it, `missing="drop"`
    leaves them out. Raises `ValueError` otherwise, and for NaN or Inf.
    """
    shapes = {
        each.names[place]: tuple(each.parameters[each.names[place]].shape)
        for each in traffic.modules
        for place in each.trained()
    }
    memory: dict[str, Tensor] = dict(state["memory"])
    strange = sorted(name for name, each in memory.items() if shapes.get(name) != tuple(each.shape))
    if strange and missing == "refuse":
        raise ValueError(
            f"the state has other parameters, such as {strange[0]!r}: load it into the model of which it was "
            "saved, or pass missing='drop' to leave them out"
        )
    if not isinstance(state.get("stepped", []), list):
        raise ValueError(f"the state has {state['stepped']!r} as the names of stepped parameters, not a list")
    broken = [name for name, each in memory.items() if not bool(each.isfinite().all())]
    if broken:
        raise ValueError(f"the state is damaged: {broken[0]!r} has NaN or Inf")
    return {name: each for name, each in memory.items() if name not in strange}


def _take_up(
    traffic: Traffic,
    state: State,
    memory: Mapping[str, Tensor],
    rooms: Sequence[Unsent | None],
    stepped: Set[str],
) -> None:
    traffic.optimizer_log.forget()
    traffic.optimizer_log.stepped.clear()
    traffic.optimizer_log.stepped.update(stepped)
    # A mean is shared out among the ranks that remember rows for the same target.
    world = traffic.group.size()
    share = 1.0 if state["rank"] is not None else world / len(traffic.targets)
    for each, scatter, unsent in zip(traffic.modules, traffic.scatters, rooms, strict=True):
        scatter.unsent = unsent
        if unsent is None:
            continue
        unsent.clear()
        for name in unsent.columns:
            if name in memory:
                rows = each.rows(each.names.index(name), memory[name].to(each.device), world)
                unsent.committed(name).copy_(share * rows[unsent.places])
    traffic.go_on(int(state["step"]), int(state["draws"]))
    dropped = sorted(state["memory"].keys() - memory.keys())
    if dropped:
        warnings.warn(
            f"parameters have changed since the state was saved: what was unsent of {', '.join(dropped[:3])} "
            f"({len(dropped)} in all) is lost",
            GradwireWarning,
            stacklevel=2,
        )
