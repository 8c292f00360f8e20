"""Whatever is wrong with one rank's state: all ranks refuse, and nothing has changed on any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.errors import RanksDisagree
from gradwire.kernels.range import LARGEST_SUM
from gradwire.recipes import parse
from tests.support.looped import looped
from tests.support.rig import Rig, gradients

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")

RECIPE = "dgc(ratio=0.1, warmup_steps=0)"
POLICY = {
    "first.weight": "powersgd(rank=2, warmup_steps=0)",
    "last.weight": "ar_topk",
    "middle.weight": "gcomp(mode='lossless')",
}
"""So that a state has two planes, and all that exchanges keep; the rest is sent by `RECIPE`."""

State = dict[str, Any]
Damage = Callable[[State], object]


def _rig(comm: Comm, steps: int, per_node: int = 1) -> Rig:
    rig = Rig(comm, RECIPE, policy=lambda spec: POLICY.get(spec.name), per_node=per_node)
    for step in range(steps):
        assert rig.step(gradients(comm.rank, step)).step.committed
    return rig


@functools.cache
def _saved(world: int, per_node: int = 1) -> list[State]:
    return run_ranks(world, lambda comm: state.save(_rig(comm, 2, per_node).reducer))


def _set(*path: str | int) -> Callable[[object], Damage]:
    """Damages that put something else at the end of `path`."""

    def at(value: object) -> Damage:
        def damage(saved: State) -> None:
            *inside, last = path
            held: Any = functools.reduce(lambda each, key: each[key], inside, saved)
            held[last] = value(held[last]) if callable(value) else value

        return damage

    return at


def _with(value: float) -> Callable[[Tensor], Tensor]:
    """A copy of which one element in the middle is `value`."""

    def changed(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.view(-1)[copy.numel() // 2] = value
        return copy

    return changed


def _without(*path: str) -> Damage:
    def damage(saved: State) -> None:
        *inside, last = path
        del functools.reduce(lambda each, key: each[key], inside, saved)[last]

    return damage


WEIGHT, BIAS = "first.weight", "first.bias"
memory, momentum = _set("memory", WEIGHT), _set("planes", "momentum", BIAS)
step, plan = _set("step"), _set("plan")
factor, counts = _set("kept", "Q", WEIGHT), _set("kept", "symbols from 0", "middle.weight")

DAMAGES: dict[str, Damage] = {
    "memory empty": _set("memory")({}),
    "memory of fewer parameters": _without("memory", WEIGHT),
    "memory of a stranger": _set("memory", "stranger")(torch.zeros(3)),
    "memory None": _set("memory")(None),
    "memory of numbers": memory([1.0, 2.0]),
    "memory NaN": memory(_with(torch.nan)),
    "memory Inf": memory(_with(-torch.inf)),
    "memory too large": memory(_with(LARGEST_SUM)),
    "memory too large for float32": memory(lambda x: _with(1e200)(x.double())),
    "memory int64": memory(lambda x: x.to(torch.int64)),
    "memory complex": memory(lambda x: x.to(torch.complex64)),
    "memory bool": memory(lambda x: x.to(torch.bool)),
    "memory sparse": memory(lambda x: x.to_sparse()),
    "memory meta": memory(lambda x: x.to("meta")),
    "memory quantized": memory(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
    "memory flat": memory(lambda x: x.view(-1)),
    "planes empty": _set("planes")({}),
    "planes None": _set("planes")(None),
    "a plane of a stranger": _set("planes", "velocity")({WEIGHT: torch.zeros(37, 61)}),
    "a plane without a parameter": _without("planes", "momentum", BIAS),
    "a plane NaN": momentum(_with(torch.nan)),
    "a plane int64": momentum(lambda x: x.to(torch.int64)),
    "a plane sparse": momentum(lambda x: x.to_sparse()),
    "step text": step("2"),
    "step None": step(None),
    "step NaN": step(torch.nan),
    "step 2.0": step(2.0),
    "step negative": step(-5),
    "step True": step(True),
    "step endless": step(2**63),
    "step a tensor": step(torch.tensor(2)),
    "stepped a text": _set("stepped")(WEIGHT),
    "stepped with a number": _set("stepped")([WEIGHT, 1]),
    "stays a number": _set("stays")(1),
    "following a text": _set("following")("dense"),
    "following without why": _set("following")({"plan": "dense", "stays": False}),
    "following unknown": _set("following")({"plan": "topkk", "why": "", "stays": False}),
    "health None": _set("health")(None),
    "health without losses": _without("health", "losses"),
    "lowest loss of two numbers": _set("health", "losses", "lowest")([1.0, 2.0]),
    "last loss NaN": _set("health", "losses", "last")(torch.nan),
    "loss that varies by less than nothing": _set("health", "losses", "lowest")([2.0, 1.0, -1.0]),
    "looks above True": _set("health", "losses", "above")(True),
    "a sign without step": _set("health", "complaints")([["it has grown"]]),
    "composition a list": _set("health", "composition")([]),
    "lateness a text": _set("health", "composition", "lateness", "late")("1.0"),
    "lateness Inf": _set("health", "composition", "lateness", "late")([torch.inf]),
    "lateness begun with one norm": _set("health", "composition", "lateness", "begun")([[1.0]]),
    "lateness begun as in older states, without their error": _set(
        "health", "composition", "lateness", "begun"
    )([[1.0, 0.5, 0.0]]),
    "an older state's error Inf": _set("health", "composition", "lateness", "error")([torch.inf]),
    "noted None": _set("noted")(None),
    "noted losses NaN": _set("noted", "losses")([1.0, torch.nan, 0.0]),
    "weighed of two numbers": _set("noted", "weighed")([1, 2.0]),
    "weighed of seven numbers": _set("noted", "weighed")([1, *6 * [2.0]]),
    "rank text": _set("rank")("0"),
    "rank beyond the world": _set("rank")(7),
    "rank alone is missing": _set("rank")(None),
    "world 0": _set("world")(0),
    "world True": _set("world")(True),
    "plan a number": plan(5),
    "plan unknown": plan("topkk"),
    "plan that measures": plan("covap"),
    "plan no text at all": plan("topk(values='\ud800')"),
    "plan too deep": plan("topk(ratio=" + "-" * 20_000 + "1)"),
    "why None": _set("why")(None),
    "kept None": _set("kept")(None),
    "kept of a stranger": _set("kept", "Q", "stranger")(torch.zeros(2, 3)),
    "kept NaN": factor(_with(torch.nan)),
    "kept of another shape": factor(lambda x: x[:, 1:].clone()),
    "kept int64": factor(lambda x: x.to(torch.int64)),
    "kept skew": factor(lambda x: 2 * x),
    "kept meta": factor(lambda x: x.to("meta")),
    "kept text": factor("Q"),
    "kept of no known kind, NaN": _set("kept", "mine")({WEIGHT: torch.tensor(torch.nan)}),
    "counts negative": counts(lambda x: x - 1),
    "counts floating": counts(lambda x: x.double()),
    "counts few": counts(lambda x: x[:7].clone()),
    "led NaN": _set("kept", "led/0", "last.weight")(_with(torch.nan)),
    "layout of another model": _set("layout")("0" * 16),
    "format text": _set("format")("5"),
    **{f"{key} missing": _without(key) for key in ("rank", "world", "layout", "step", "memory", "kept")},
}


def _refused(*by_rank: object) -> list[Exception]:
    """What each rank raises on loading its own of these, after which all is bit for bit as before."""
    return [errors[""] for errors in _all_refused({"": by_rank})]


def _all_refused(
    tried: Mapping[str, Sequence[object]], missing: state.Missing = "refuse", per_node: int = 1
) -> list[dict[str, Exception]]:
    """The same by name, of several that the same ranks load one after the other."""

    def rank(comm: Comm) -> dict[str, Exception]:
        rig, errors = _rig(comm, 1, per_node), {}
        reducer, before, plan = rig.reducer, rig.planes, rig.reducer.running
        for name, by_rank in tried.items():
            try:
                state.load(reducer, by_rank[comm.rank], missing)
                raise AssertionError(f"{name} is taken")
            except (ValueError, RanksDisagree) as error:
                errors[name] = error
            assert (reducer.step, reducer.running, reducer.measuring) == (1, plan, False), name
            assert rig.planes.keys() == before.keys(), name
            assert all(torch.equal(plane, before[each]) for each, plane in rig.planes.items()), name
        return errors

    return run_ranks(len(next(iter(tried.values()))), rank)


def _damaged(name: str, good: State | None = None, **other: object) -> State:
    """`good`, or the second rank's of two, with `other` entries; where the damage does not replace those."""
    saved = deepcopy(good or _saved(2)[1]) | other
    DAMAGES[name](saved)
    return saved


@pytest.mark.parametrize("per_node", [1, 2], ids=["whole", "shards"])
def test_a_damaged_state_on_one_rank_is_refused_on_all(per_node: int) -> None:
    good = _saved(2 * per_node, per_node)
    tried = {name: [good[0], _damaged(name, good[1]), *good[2:]] for name in DAMAGES}
    for rank, errors in enumerate(_all_refused(tried, per_node=per_node)):
        for name, error in errors.items():
            assert isinstance(error, ValueError if rank == 1 else RanksDisagree), name
            assert rank == 1 or "the state to load" in str(error), name


KINDS: dict[str, Callable[[str], object]] = {
    "of a rank alone": lambda name: _damaged(name, rank=0, world=1),
    "in a list of old ranks": lambda name: [_saved(2)[0], _damaged(name)],
    "a mean": lambda name: _damaged(name, rank=None, world=None),
}
"""States that a rank loads alone. Each kind is chosen in a way of its own."""


@looped(("kind", "missing"), product(KINDS, get_args(state.Missing)))
def test_a_damaged_state_of_any_kind_is_refused_by_a_rank_alone(kind: str, missing: state.Missing) -> None:
    tried = {name: (KINDS[kind](name),) for name in DAMAGES}
    if kind == "a mean":
        del tried["rank alone is missing"]  # as it should be
    if missing == "drop":
        del tried["layout of another model"]  # of which all is taken that fits
    (errors,) = _all_refused(tried, missing)
    assert errors.keys() == tried.keys()
    assert all(isinstance(error, ValueError) for error in errors.values())


@pytest.mark.parametrize("saved", [None, 5, "state", [5], [None], b"state", [[]]])
def test_what_is_no_state_at_all_is_refused(saved: object) -> None:
    (refused,) = _refused(saved)
    assert "not a state of gradwire" in str(refused)


def test_what_nobody_foresaw_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, known = parse.recipe, _saved(2)[0]["plan"]

    def parses(text: Any) -> Any:
        if text == "too much":
            raise MemoryError
        return honest(text)

    monkeypatch.setattr("gradwire.checkpoint.validate.recipe", parses)
    states = [{**each, "plan": plan} for each, plan in zip(_saved(2), (known, "too much"), strict=True)]
    fits, refused = _refused(*states)
    assert isinstance(fits, RanksDisagree)
    assert isinstance(refused, ValueError)
    assert isinstance(refused.__cause__, MemoryError)


def test_what_exchanges_keep_must_be_equal_on_all_ranks() -> None:
    states = deepcopy(_saved(2))
    states[1]["kept"]["Q"][WEIGHT].neg_()
    for error in _refused(*states):
        assert isinstance(error, RanksDisagree)
        assert "what exchanges keep" in str(error)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_memory_of_another_floating_type_is_converted(dtype: torch.dtype) -> None:
    """Also of a long run."""
    saved = deepcopy(_saved(1)[0]) | {"step": 10**9}
    saved["memory"] = {name: nn_parameter(each.to(dtype)) for name, each in saved["memory"].items()}

    def rank(comm: Comm) -> None:
        rig = _rig(comm, 0)
        state.load(rig.reducer, saved)
        for name, kept in saved["memory"].items():
            assert torch.equal(rig.memory[name], kept.detach().float().view(-1))
            assert not rig.reducer.layout.memory(name).requires_grad
        assert rig.step(gradients(0, 2)).step.committed
        assert rig.reducer.step == 10**9 + 1

    run_ranks(1, rank)


def nn_parameter(tensor: Tensor) -> Tensor:
    """As someone may have saved it, with a gradient to be."""
    return torch.nn.Parameter(tensor)
