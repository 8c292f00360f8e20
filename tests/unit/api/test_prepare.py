"""What is prepared for a recipe is all that its steps call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numba
import pytest
import torch
from numba.core.dispatcher import Dispatcher
from numba.core.sigutils import normalize_signature
from torch import Tensor

from gradwire import kernels
from gradwire._api import prepare as preparing
from gradwire._api.prepare import kernels_for, kernels_of
from gradwire.comm import Comm, run_ranks
from gradwire.contrib.randomk import sampled
from gradwire.exchange.base import STEADY, Exchange, run
from gradwire.kernels import cpu, frames, prepare, topk_indices
from gradwire.kernels.cpu.prepared import SIGNATURES
from gradwire.recipes import recipe
from gradwire.step.arena import ParameterSpec
from gradwire.step.context import ExchangeContext, Part, Replicated
from gradwire.step.layout import build, by_size
from tests.support.folding import Folding
from tests.support.recipes import LAWS, composed

Call = tuple[str, ...]
"""Name and types of what a kernel is compiled for."""

SHAPES = ((60, 100), (3,), (2_999,))


def entrances() -> Iterator[tuple[ModuleType, str, Dispatcher]]:
    """Where Python finds kernels: `_fold` in `cpu.folding`, `_encode_chunks` in `frames`."""
    for owner in (frames, *(each for each in vars(cpu).values() if isinstance(each, ModuleType))):
        for name, value in list(vars(owner).items()):
            if isinstance(value, Dispatcher):
                yield owner, name, value


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Call]]:
    """Which kernels Python calls meanwhile, and with what."""
    noted: set[Call] = set()

    def noting(kernel: Dispatcher) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*arguments: Any) -> Any:
            noted.add((kernel.__name__, *(str(numba.typeof(each)) for each in arguments)))
            return kernel(*arguments)

        return call

    prepare()  # what is compiled now would not find what it calls
    with monkeypatch.context() as patch:
        for owner, name, kernel in entrances():
            patch.setattr(owner, name, noting(kernel))
        yield noted


def declared(subjects: Collection[str]) -> set[Call]:
    """What `prepare` compiles for these subjects."""
    return {
        (kernel.__name__, *map(str, normalize_signature(f"({types},)")[0]))
        for subject in subjects
        for kernel, types in SIGNATURES.get(subject, [])
    }


def like_all(name: str) -> Replicated:
    """A parameter of SHAPES, and an optimizer without a state."""
    parameter = torch.ones(SHAPES[int(name)], requires_grad=True)
    [group] = torch.optim.SGD([parameter], lr=0.1).param_groups
    return Replicated(parameter.detach(), group, {}, torch.optim.SGD)


def train(exchange: Exchange, comm: Comm) -> None:
    """Two steps behind any warm-up of a unit of several parameters."""
    specs = [Part(str(number), shape, 0, torch.Size(shape).numel()) for number, shape in enumerate(SHAPES)]
    total = sum(part.numel for part in specs)
    folding = None if exchange.memory is None else Folding(exchange.memory, total)
    ctx = ExchangeContext(STEADY, 1, comm.rank, comm.world, parts=tuple(specs), replicas=like_all)
    for step in range(STEADY, STEADY + 2):
        grad = torch.randn(total, generator=torch.Generator().manual_seed(8 * step + comm.rank))
        x = grad if folding is None else folding.fold(grad, step, comm.world)
        ctx = replace(ctx, step=step, unsent=None if folding is None else folding.committed.get("unsent"))
        if exchange.rounds(total, torch.float32, ctx):
            run(exchange, x, torch.empty_like(x), comm, ctx)
        ctx.kept.commit()
        if folding is not None:
            folding.commit()


@pytest.mark.parametrize("text", LAWS)
def test_steps_call_nothing_that_was_not_prepared(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = composed(text).exchange
    prepared = declared(kernels_of(exchange))
    sampled.cache_clear()
    for world in (2, 5):
        with calls(monkeypatch) as called:
            run_ranks(world, functools.partial(train, exchange))
        assert called <= prepared, f"{world} ranks"


def test_what_a_recipe_does_not_call_is_not_prepared() -> None:
    assert kernels_of(composed("int4").exchange) & SIGNATURES.keys() == {"blocks", "folding"}
    assert kernels_of(composed("powersgd").exchange) & SIGNATURES.keys() == {"folding", "low_rank"}


def prepared_for(text: str, *sizes: int) -> frozenset[str]:
    specs = [ParameterSpec(str(number), (size, 1), torch.float32, size) for number, size in enumerate(sizes)]
    main = recipe(text or "dense").build()
    return kernels_for(build(specs, main, by_size(), torch.device("cpu"), 2)) & SIGNATURES.keys()


def test_layouts_without_memory_need_no_kernels() -> None:
    assert prepared_for("", 10, 10**5) == set()
    assert prepared_for("fp16", 10, 10**5) == set()


def test_layouts_need_what_their_lanes_and_their_watch_need() -> None:
    assert prepared_for("int8", 10, 10**5) == {"blocks", "folding"}
    assert "magnitudes" in prepared_for("flexible", 10, 10**5)


@dataclass
class Own:
    """Part of somebody's own exchange, written here, where `topk_indices` was imported."""

    held: object = None
    late: object = field(init=False)

    def look(self, x: Tensor) -> Tensor:
        """What a watch may call."""
        return topk_indices(x, 1)


class Plain:
    """No dataclass."""

    def __init__(self, held: object) -> None:
        self.held = held


@pytest.mark.parametrize(
    "held",
    [
        Own(),
        Own().look,
        [{"any": (functools.partial(prepared_for, "dense"),)}],
        type("Derived", (Own,), {"__module__": "elsewhere"}),
    ],
    ids=["dataclass", "method", "function", "derived"],
)
def test_modules_of_users_are_looked_at_too(held: object) -> None:
    assert "topk" in kernels_of(held)


def test_what_is_held_is_looked_at() -> None:
    assert kernels_of(sampled) == {"draws"}  # wrapped by a cache
    assert "blocks" in kernels_of(Plain([composed("int8").exchange]))


def test_what_holds_itself_has_an_end() -> None:
    one, two = Own(), Own()
    one.held, two.held = [two], one
    assert "topk" in kernels_of(one)


def test_values_name_nothing() -> None:
    assert kernels_of(torch.float32, None, 3.5, "text", torch.zeros(3), [1, 2], torch) == set()


@pytest.mark.parametrize(("long_s", "levels"), [(0.0, ["INFO", "WARNING", "WARNING"]), (1e9, ["INFO"])])
def test_compiling_is_said_when_it_begins_and_shows_by_default_when_it_takes_long(
    long_s: float, levels: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it goes on, and not only at the end: the first of three kernels has taken longer than it may."""

    def compiles(_names: object, turn: int) -> None:
        for more in range(3):
            numba.njit(lambda x, more=more: x + more)(1)

    monkeypatch.setattr(kernels, "prepare", compiles)
    caplog.set_level(logging.INFO, "gradwire")
    preparing.prepare("int8", frozenset, 0, long_s)
    assert [each.levelname for each in caplog.records] == levels
    assert all("compiling kernels for int8" in each for each in caplog.messages)
