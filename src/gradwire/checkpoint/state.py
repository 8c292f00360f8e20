"""Exact checkpoints: plain tensors per rank, keyed by parameter name, with a version.

A reducer's state is one dictionary per rank. It is saved under a key that names the rank, or "mean"
(`keyed`), so that a saver which merges the dictionaries of all ranks keeps every one of them.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradwire.agreement.agree import damage, on_all_ranks, require_agreement, require_undamaged
from gradwire.checkpoint.validate import (
    FORMAT,
    State,
    all_planes,
    composition_of,
    described,
    fitted,
    validate,
)
from gradwire.comm import Comm, gathered
from gradwire.errors import GradwireWarning, RanksDisagree
from gradwire.memory import UNSENT
from gradwire.planning.health import Losses, pooled
from gradwire.recipes import Composition
from gradwire.recipes.parse import short
from gradwire.step.installed import RecipeSnapshot
from gradwire.step.layout import Layout
from gradwire.step.reducer import Reducer
from gradwire.step.shards import cut, joined
from gradwire.unit.parameters import layout_hash

Saved: TypeAlias = State | Sequence[State]
"""A state, or a list of the states of all ranks of some world."""

Kept: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""Tensors that exchanges keep beside the memory, by kind and parameter name."""

Missing = Literal["refuse", "drop"]
"""Treatment of missing parts, refused or dropped: states of old ranks, parameters that only one side has."""


SOURCE_STATE = "source"
"""Key of the source's own part of a state (`SourceState`), if it has one."""


def keyed(state: State) -> dict[str, Any]:
    """Put `state` under a key that no other rank uses: "rank0", "rank1", …, or "mean".

    >>> keyed({"rank": 1, "world": 2})
    {'rank1': {'rank': 1, 'world': 2}}
    """
    return {"mean" if state["rank"] is None else f"rank{state['rank']}": state}


def single(saved: Saved) -> list[State]:
    """List the states in `saved`, one per rank and without their keys, whether it is a list or a merged
    dictionary.

    >>> single([{"rank0": {"rank": 0}}, {"rank1": {"rank": 1}}])
    [{'rank': 0}, {'rank': 1}]
    """
    if not isinstance(saved, Mapping):
        return [state for each in saved for state in (single(each) if isinstance(each, Mapping) else [each])]
    if "format" not in saved and saved and all(isinstance(each, Mapping) for each in saved.values()):
        return list(saved.values())
    return [saved]


def save(reducer: Reducer) -> dict[str, Any]:
    """This rank's state, as copies on the CPU.

    Exchanged gradients that no optimizer has used yet leave no trace in it, because a resumed run does not
    have these gradients.
    """
    source_state = reducer.env.source_state
    return _on_host(
        _copied(reducer) | ({} if source_state is None else {SOURCE_STATE: deepcopy(source_state.save())})
    )


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    def moved(each: Any) -> Any:
        if isinstance(each, dict):
            return {key: moved(value) for key, value in each.items()}
        if isinstance(each, list):
            return [moved(value) for value in each]
        return each.cpu() if isinstance(each, Tensor) else each

    found: dict[str, Any] = moved(state)
    return found


def _copied(reducer: Reducer) -> dict[str, Any]:
    """The reducer's state, copied on the device of the memory."""
    reducer.commit_deferred()
    layout = reducer.layout
    if layout.alone:
        # As it would be in company, where the run may go on.
        layout = reducer.layout_of(layout.main)
        layout.take_over(reducer.layout)
    planes: dict[str, dict[str, Tensor]] = {UNSENT: {}}
    for spec in reducer.specs:
        for plane in layout.planes_of(spec.name):
            # In the gradient's accumulating type, so that a mean over ranks is not taken in bfloat16.
            memory = layout.final(spec.name, plane).to(
                reducer.placement.memory.where, spec.plane_dtype, copy=True
            )
            planes.setdefault(plane, {})[spec.name] = spec.shaped(memory).contiguous()
    shard = reducer.shard
    shapes = {spec.name: list(spec.whole.shape) for spec in reducer.specs}
    return {
        "format": FORMAT,
        "shard": None if shard is None else (shard.number, shard.parts),
        **({} if shard is None else {"shapes": shapes}),
        "rank": reducer.env.control.rank,
        "world": reducer.env.control.world,
        "layout": layout_hash(reducer.specs),
        "plan": reducer.running,
        "why": layout.main.why,
        "step": reducer.step,
        "stays": layout.main.stays,
        "following": None if reducer.following is None else _decided(reducer.following),
        "stepped": sorted(reducer.env.stepped),
        "health": _health(reducer),
        "noted": _noted(reducer),
        "memory": planes.pop(UNSENT),
        "planes": planes,
        "kept": _kept(layout),
    }


def _decided(following: Composition) -> dict[str, Any]:
    """A decision of the last step, as saved. The plan is `None` if that measures."""
    plan = following.text if following.next is None else None
    return {"plan": plan, "why": following.why, "stays": following.stays}


def _health(reducer: Reducer) -> dict[str, Any]:
    """Signs that training suffers, equal on all ranks."""
    condition = reducer.condition
    return {**reducer.health.save(), "composition": None if condition is None else condition.save()}


def _noted(reducer: Reducer) -> dict[str, Any]:
    """Losses and norms of this rank that the others do not know yet."""
    condition = reducer.condition
    return {
        "losses": list(reducer.health.noted),
        "weighed": None if condition is None else condition.save_waiting(),
    }


def _take_up_health(reducer: Reducer, state: State) -> None:
    if "health" not in state:  # older states lack it
        return
    noted, condition = state.get("noted") or _noted_by([]), reducer.condition
    reducer.health.take_up(state["health"], Losses(*noted["losses"]))
    saved = state["health"]["composition"]
    if condition is not None and saved is not None:
        condition.take_up(saved, noted["weighed"])


def _noted_by(ranks: Sequence[Losses]) -> dict[str, Any]:
    """A share of the losses of `ranks` for each rank of any world. Norms are left out: they are of another
    memory.
    """
    found = pooled(ranks)
    return {"losses": list(found._replace(number=found.number / max(len(ranks), 1))), "weighed": None}


def _kept(layout: Layout) -> dict[str, dict[str, Tensor]]:
    """Copies, by kind and parameter name, of what exchanges keep beside the planes; equal on all ranks."""
    kept: dict[str, dict[str, Tensor]] = {}
    for flat_buffer in layout.flat_buffers:
        for kind, tensors in flat_buffer.kept.final().items():
            kept.setdefault(kind, {}).update({name: tensor.clone() for name, tensor in tensors.items()})
    return kept


def save_mean(reducer: Reducer) -> dict[str, Any]:
    """The mean memory over ranks, loadable on any rank of any world. One all-reduce per parameter, and one
    all-gather of the losses that ranks have noted.

    If nodes hold shards, it takes one all-gather more, and the state of exchanges is left out, because it is
    valid for these shards only. Raises `PeerFailed` if another rank could not copy its memory; nothing has
    been sent then.
    """
    shard, source_state = reducer.shard, reducer.env.source_state

    def copied() -> tuple[dict[str, Any], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        state = _copied(reducer) | (
            {} if source_state is None else {SOURCE_STATE: deepcopy(source_state.save_mean())}
        )
        planes = [state["memory"], *state["planes"].values()]
        return (
            state,
            planes,
            [
                {name: shard.room(each) for name, each in plane.items()} if shard is not None else {}
                for plane in planes
            ],
        )

    state, planes, rooms = on_all_ranks(copied, "copy its memory", reducer.env.control)
    specs = {spec.name: spec for spec in reducer.specs}
    found: list[Exception | None] = []
    for plane, room in zip(planes, rooms, strict=True):
        for name, memory in plane.items():
            memory.mul_(1.0 / reducer.comm.world)
            found.append(damage(reducer.comm.all_reduce(memory.view(-1))))
            if shard is not None:
                spec = specs[name]
                whole = shard.gathered(spec, spec.flat(memory), room[name], found)
                plane[name] = spec.whole.shaped(whole).contiguous()
    require_undamaged(found, reducer.env.control)
    losses = gathered(
        reducer.env.control, torch.tensor(state["noted"]["losses"], dtype=torch.float64, device="cpu")
    )
    state["noted"] = _noted_by([Losses(*each) for each in losses.tolist()])
    if shard is not None:
        state |= {"shard": None, "kept": {}, "layout": layout_hash([spec.whole for spec in reducer.specs])}
        del state["shapes"]
    return _on_host({**state, "rank": None, "world": None})


@dataclass(frozen=True)
class _Ready:
    """A loaded state, prepared to run: applying it cannot fail. `facts` are compared over ranks."""

    runs: RecipeSnapshot
    facts: Mapping[str, str]
    apply: Callable[[], None] = lambda: None
    """Function that applies the source's part."""
    dropped: tuple[int, ...] = ()
    """Old ranks whose unsent gradients are lost."""
    changed: frozenset[str] = frozenset()
    """Parameters that only the state, or only this model, has."""
    stepped: frozenset[str] = frozenset()
    """`ReducerEnvironment.stepped` of the run that goes on."""
    following: Composition | None = None
    """The composition that was decided before the state was saved, and had not begun to run."""
    take_up_health: Callable[[], None] = lambda: None
    """Function that goes on with the signs that training suffers."""


def load(reducer: Reducer, saved: Saved, missing: Missing = "refuse", *, mean: bool = False) -> None:
    """Load a state, on all ranks together; after an error nothing has changed on any rank.

    Args:
        reducer: reducer that takes up the state.
        saved: this rank's own state, or a mean, or a list of all old ranks' states. From a list of as many
            ranks, every rank takes its own. Otherwise, or if nodes or parameters are cut differently now, all
            start with the mean, so that the total of unsent gradients stays the same.
        missing: "drop" allows a list that lacks ranks, whose unsent gradients are lost, and other parameters
            (`fitted`); "refuse" raises.
        mean: True to start all ranks with the mean in any case.

    Raises `ValueError` if a state is damaged or does not belong here, and `RanksDisagree` on the other ranks.
    """
    reducer.commit_deferred()
    mean = not all_fit(reducer, saved) or mean
    ready, refusal = _prepared(reducer, saved, missing, mean)
    facts = {"the state to load": "fits" if refusal is None else f"refused, {refusal}"}
    named = "step", "plan", "health", "kind of state", "what exchanges keep", "changed parameters"
    absent = dict.fromkeys((*named, SOURCE_STATE), "none")
    try:
        mine = absent if ready is None else {**ready.facts, "changed parameters": str(sorted(ready.changed))}
        if reducer.env.sharded:
            mine["what exchanges keep"] = _compared(mine["what exchanges keep"], reducer.comm)
        require_agreement(facts | mine, reducer.env.control)
    except RanksDisagree:
        if refusal is None:
            raise
    if refusal is not None:
        raise refusal
    assert ready is not None, "or there would be a refusal"
    reducer.restore(ready.runs)
    reducer.begin_anew()
    reducer.env.stepped.clear()
    reducer.env.stepped.update(ready.stepped)
    ready.take_up_health()
    if ready.following is not None:
        reducer.go_on_with(ready.following)
    ready.apply()
    # Last of all: where warnings are errors, perhaps on this rank only, nothing is half loaded then.
    _warn_of_another_recipe(reducer)
    _warn_of_dropped_ranks(ready)
    _warn_of_changed_parameters(ready)


def own(reducer: Reducer) -> dict[str, Any]:
    """The reducer's state on this rank, copied to the CPU, without the source's part."""
    return _on_host(_copied(reducer))


def go_on(reducer: Reducer, saved: State | None, kept: Kept, step: int) -> None:
    """Let a reducer continue, at `step`, from the `own` state of another reducer on this rank. No
    communication.

    The other reducer may have had another number of ranks: the memory is this rank's own. The memory begins
    at zero if `saved` is `None`, or ranks hold other shards now. Exchanges continue from `kept`, which is
    equal on all ranks.
    """
    if saved is None or not is_of_our_shard(reducer, saved):
        layout = reducer.layout_of(reducer.recipe.build())
        _keep(layout, kept)
        runs = reducer.prepared(reducer.remembering(layout), step)
    else:
        runs = _made(reducer, {**saved, "kept": kept, "step": step}).runs
    reducer.restore(runs)
    reducer.begin_anew()


def _compared(text: str, comm: Comm) -> str:
    """Compare `text` over ranks that hold the same shard; returns "the same", or the disagreement.

    Ranks with different shards have different texts.
    """
    try:
        require_agreement({"what exchanges keep": text}, comm)
    except RanksDisagree as error:
        return str(error)
    return "the same"


def _prepared(
    reducer: Reducer, saved: Saved, missing: Missing, mean: bool
) -> tuple[_Ready | None, Exception | None]:
    """Prepare to load a state; changes nothing. The arguments are those of `load`.

    Returns the prepared state, or the error, which other ranks must hear of.
    """
    try:
        if missing not in get_args(Missing):
            raise ValueError(f"missing={missing!r} is neither 'refuse' nor 'drop'")
        states, changed = single(saved), frozenset[str]()
        alone = isinstance(saved, Mapping) and len(states) == 1
        if missing == "drop":
            fits = [fitted(reducer, each) for each in states]
            states, changed = [each for each, _ in fits], changed.union(*(names for _, names in fits))
        for each in states:
            validate(reducer, each)
        chosen, dropped = _choose(reducer, states, alone=alone, missing=missing, mean=mean)
        text, apply = _prepared_beside(reducer, chosen, states)
        made = _made(reducer, chosen, dropped)
        return replace(made, facts={**made.facts, SOURCE_STATE: text}, apply=apply, changed=changed), None
    except ValueError as error:
        return None, error
    except Exception as error:  # memory that runs out, a plan that no parser can read, ...
        refusal = ValueError(f"this is not a state of gradwire, or it cannot be loaded: {error!r}")
        refusal.__cause__ = error
        return None, refusal


def _prepared_beside(
    reducer: Reducer, chosen: State, states: Sequence[State]
) -> tuple[str, Callable[[], None]]:
    """Prepare the source's part of the `chosen` state, which is one of `states` or their mean.

    Returns (fingerprint to compare over ranks, function that applies it).
    """
    source_state, here = reducer.env.source_state, reducer.shard
    held = [each for each in states if SOURCE_STATE in each]
    if source_state is None and not held:
        return "none", lambda: None
    if source_state is None:
        raise ValueError("state was saved with gradwire.outer, and this model is carried by attach")
    if len(held) < len(states):
        raise ValueError("state was saved with gradwire.attach, and this model is carried by outer")
    own = any(chosen is each for each in states)
    if own:
        return source_state.prepared(chosen[SOURCE_STATE], own=chosen["rank"] is not None)
    # Ranks with other shards have other parameters of their own.
    mine = [each for each in states if here is None or (each.get("shard") or (None,))[0] == here.number]
    return source_state.prepared((mine or states)[0][SOURCE_STATE], own=False)


def _made(reducer: Reducer, state: State, dropped: Sequence[int] = ()) -> _Ready:
    composition, decided = composition_of(reducer, state), state.get("following")
    if state["plan"] is not None:
        composition = _loaded(composition, state)
    following = None
    # A recipe that measures nothing has no place for a decision to measure.
    if decided is not None and (decided["plan"] is not None or reducer.recipe.build().next is not None):
        following = _loaded(composition_of(reducer, decided), decided)
    layout, shard = reducer.layout_of(composition), reducer.shard
    specs = {spec.name: spec for spec in reducer.specs}
    for plane, memories in all_planes(state).items():
        for name, memory in memories.items():
            spec = specs[name]
            if shard is not None and state.get("shard") is None:
                whole = spec.whole.flat(memory.detach())
                layout.memory(name, plane).copy_(cut(spec, shard.number, whole))
            else:
                spec.shaped(layout.memory(name, plane)).copy_(memory.detach())
    _keep(layout, state["kept"])
    here = reducer.remembering(layout)
    facts = {
        "step": str(state["step"]),
        "plan": str(state["plan"]),
        "health": _text_digest(str([state.get(key) for key in ("health", "stays", "following")])),
        "kind of state": _kind(state, dropped)
        + ("" if is_of_our_shard(reducer, state) else ", of other shards"),
        "what exchanges keep": _digest(state["kept"]),
    }
    runs = reducer.prepared(here, state["step"])
    stepped = frozenset(state.get("stepped", reducer.env.stepped))  # older states lack it
    return _Ready(
        runs,
        facts,
        dropped=tuple(dropped),
        stepped=stepped,
        following=following,
        take_up_health=lambda: _take_up_health(reducer, state),
    )


def _loaded(composition: Composition, state: State) -> Composition:
    return replace(composition, why=f"loaded; {state['why'].removeprefix('loaded; ')}")


def _text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _keep(layout: Layout, kept: Kept) -> None:
    for kind, tensors in kept.items():
        for name, tensor in tensors.items():
            flat_buffer = layout.slots[name][0]
            flat_buffer.kept.put(kind, name, tensor.detach().to(flat_buffer.x.device, copy=True))
    for flat_buffer in layout.flat_buffers:
        flat_buffer.kept.commit()


def _kind(state: State, dropped: Sequence[int]) -> str:
    if state["rank"] is None:
        return "a mean"
    return f"of {state['world']} ranks" + (f" without {list(dropped)}" if dropped else "")


def _digest(kept: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Hash, in 16 hexadecimal digits, of names, types, shapes and values of all `kept` tensors.

    Ranks compare it before they resume: with different tensors their parameters would diverge.
    """
    found = hashlib.blake2b(digest_size=8)
    for kind, tensors in sorted(kept.items()):
        for name, tensor in sorted(tensors.items()):
            found.update(f"{kind} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _warn_of_another_recipe(reducer: Reducer) -> None:
    asked = reducer.recipe.build()
    if asked.next is None and reducer.running not in (None, asked.text):
        warnings.warn(
            f"the loaded state goes on with {short(str(reducer.running))}, not with the recipe "
            f"{short(asked.text)} given to attach",
            GradwireWarning,
            stacklevel=2,
        )


def _warn_of_dropped_ranks(ready: _Ready) -> None:
    if ready.dropped:
        ranks = ", ".join(map(str, ready.dropped))
        warnings.warn(
            f"what old rank {ranks} had not sent is lost, as missing='drop' allows; all ranks start with the "
            "mean of the others",
            GradwireWarning,
            stacklevel=2,
        )


def _warn_of_changed_parameters(ready: _Ready) -> None:
    if names := sorted(ready.changed):
        warnings.warn(
            f"parameters have changed since the state was saved: {', '.join(names[:3])} ({len(names)} in "
            "all) begin with nothing unsent, or are gone, as missing='drop' allows",
            GradwireWarning,
            stacklevel=2,
        )


def _choose(
    reducer: Reducer, states: Sequence[State], *, alone: bool, missing: Missing, mean: bool
) -> tuple[State, Sequence[int]]:
    """Choose the state that this rank loads: the one given `alone`, its own from a list, or the mean of all.

    `missing` and `mean` are those of `load`. Also returns the old ranks that are dropped. Raises `ValueError`
    if no state suits this rank.
    """
    here = reducer.env.control
    if alone:
        (state,) = states
        if state["world"] is None:
            return (state if reducer.shard is None else _for_other_shards(state)), ()
        if (state["world"], state["rank"]) != (here.world, here.rank):
            raise ValueError(
                f"state is rank {state['rank']}'s of {state['world']}, this is rank {here.rank} of "
                f"{here.world}; load its own, a list of all ranks', or a mean_state_dict()"
            )
        if not is_of_our_shard(reducer, state):
            raise ValueError(
                "state was saved with other nodes; load a list of all ranks', or a mean_state_dict()"
            )
        return state, ()
    if any(each["rank"] is None for each in states):
        raise ValueError("load a mean alone: a list must hold the state of every rank")
    states = sorted(states, key=lambda each: int(each["rank"]))
    if not states:
        raise ValueError("the list of states is empty: it must hold the state of every old rank")
    if len({each["world"] for each in states}) > 1:
        raise ValueError(f"the states are of different worlds: {[each['world'] for each in states]}")
    world, ranks = states[0]["world"], [each["rank"] for each in states]
    dropped = sorted(set(range(world)) - set(ranks))
    if len(states) != len(set(ranks)) or (dropped and missing == "refuse"):
        raise ValueError(
            f"need the states of all {world} old ranks, got ranks {ranks}. Find the others, or decide that "
            "what their ranks had not sent is lost: missing='drop' goes on without it"
        )
    if world == here.world and not (dropped or mean) and is_of_our_shard(reducer, states[here.rank]):
        return states[here.rank], ()
    if len({(each["step"], each["plan"], each["layout"]) for each in states}) > 1:
        raise ValueError("the states are of different steps, plans or models")
    if states[0].get("shard") is None and reducer.shard is None:
        return _mean_state(states), dropped
    return _for_other_shards(_whole(reducer, states)), dropped


def all_fit(reducer: Reducer, saved: Saved) -> bool:
    """True if every rank was given a state of the shard that it holds, alone or in a list.

    A collective, with the same answer on all ranks: if nodes are composed differently now, a list has the
    right state for some ranks and not for others.
    """
    control = reducer.env.control
    try:
        states = single(saved)
        own = [each for each in states if len(states) == 1 or each["rank"] == control.rank]
        mine = all(is_of_our_shard(reducer, each) for each in own)
    except Exception:  # what is no state is refused later, with the reason
        mine = False
    return bool(gathered(control, torch.tensor([mine], device="cpu")).all())


def is_of_our_shard(reducer: Reducer, state: State) -> bool:
    """True if `state` is of the shard that this rank holds; of whole parameters, if it holds these.

    FSDP cuts parameters between rows, nodes may cut elsewhere: equal numbers are not yet equal shards.
    Parameters that only the state or only this model has are not compared.
    """
    shard, theirs = reducer.shard, state.get("shard")
    if shard is None or theirs is None:
        return shard is theirs is None
    shapes = {spec.name: spec.shape for spec in reducer.specs}
    return tuple(theirs) == (shard.number, shard.parts) and all(
        tuple(memory.shape) == shapes.get(name, tuple(memory.shape))
        for memories in all_planes(state).values()
        for name, memory in memories.items()
    )


def _for_other_shards(state: State) -> State:
    """Copy `state` without what exchanges keep, which is valid only for the shards with which it was
    computed.
    """
    return {**state, "kept": {}}


def _whole(reducer: Reducer, states: Sequence[State]) -> State:
    """State of whole parameters: the mean over replicas, with the shards of each parameter joined.

    `states` are those of the old ranks. Without shards, each of them is already of whole parameters. Raises
    `ValueError` if some shard has no state, or if nodes differ in size.
    """
    if states[0].get("shard") is None:
        return _mean_state(states)
    specs, parts = {spec.name: spec for spec in described(reducer, states[0])}, states[0]["shard"][1]
    by_shard = [[each for each in states if each["shard"][0] == number] for number in range(parts)]
    if not all(by_shard):
        raise ValueError("for some shard no state is left, so its unsent gradient cannot be replaced")
    if len(states) == states[0]["world"] and len({len(each) for each in by_shard}) > 1:
        raise ValueError("the states are of nodes that differ in size")
    means = [_mean_state(each) for each in by_shard]

    def whole(plane: str) -> dict[str, Tensor]:
        found = {}
        for name in all_planes(means[0])[plane]:
            spec = specs[name]
            flat = joined(spec, [spec.flat(all_planes(mean)[plane][name]) for mean in means])
            found[name] = spec.whole.shaped(flat)
        return found

    planes = {plane: whole(plane) for plane in means[0]["planes"]}
    noted = _mean_noted(states)
    return {**states[0], **noted, "shard": None, "memory": whole(UNSENT), "planes": planes}


def _mean_state(states: Sequence[State]) -> State:
    planes = {plane: mean_of([each["planes"][plane] for each in states]) for plane in states[0]["planes"]}
    memory = mean_of([each["memory"] for each in states])
    return {**states[0], **_mean_noted(states), "memory": memory, "planes": planes}


def _mean_noted(states: Sequence[State]) -> dict[str, Any]:
    noted = [each["noted"] for each in states if "noted" in each]  # older states lack it
    return {"noted": _noted_by([Losses(*each["losses"]) for each in noted])}


def mean_of(memories: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each parameter's memory."""
    return {name: torch.stack([m[name] for m in memories]).mean(0) for name in memories[0]}
