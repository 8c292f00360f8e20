"""In all steps of one phase the same travels of a unit; and laws are computed once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.codec.blocks import blocks
from gradwire.codec.select.topk import TopK, top_k
from gradwire.codec.sparse import sparse, sparse_coded, values
from gradwire.comm import Comm, Round, run_ranks
from gradwire.contrib.dgc import ramp
from gradwire.contrib.oktopk import ok_topk
from gradwire.contrib.randomk import random_k
from gradwire.exchange.ar_topk import ar_topk
from gradwire.exchange.base import STEADY, Decode, Exchange, parts, run, steady_context
from gradwire.exchange.compose import every, remember, warm
from gradwire.exchange.dense import dense
from gradwire.exchange.leader import leader
from gradwire.exchange.low_rank import acp_sgd
from gradwire.exchange.payloads import gather, reduce
from gradwire.exchange.scatter_reduce import scatter_reduce
from gradwire.exchange.uneven_gather import agreed
from gradwire.laws import Laws, phase_of
from gradwire.recipes import recipe
from gradwire.unit.context import ExchangeContext, ExchangeState
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, LAWS, composed

WORLDS = (1, 2, 3, 4)
CYCLES = 130
"""Steps that hold two cycles of ar_topk's trials on four ranks, and of gcomp's tables; and every warm-up."""
TEXTS = list(dict.fromkeys(text for text in (*LAWS, *EVERY_RECIPE.values()) if not recipe(text).build().next))
"""All recipes but those that measure first, which run others."""
MOST = 6
"""Phases of a recipe at most: a leader on each of four ranks, one that is elected, and a warm-up."""


def contexts(world: int) -> Iterator[tuple[str, list[ExchangeContext]]]:
    """Units by a name, each in steps from the first on and after every warm-up.

    Matrices have more rows than columns, so that their factors differ in size.
    """
    steps = (*range(CYCLES), *range(STEADY, STEADY + CYCLES))
    for unit, seed, numel in ((0, 0, 8192), (2, 7, 8192), (1, 7, 97)):
        yield (
            f"unit {unit} of {numel}, seed {seed}",
            [replace(steady_context(numel, world, step), unit=unit, seed=seed) for step in steps],
        )


def travels(exchange: Exchange, unit: list[ExchangeContext]) -> dict[Hashable, set[tuple[Round, ...]]]:
    """By phase, the different rounds that the unit has in it."""
    found: dict[Hashable, set[tuple[Round, ...]]] = {}
    for ctx in unit:
        rounds = exchange.rounds(sum(part.numel for part in ctx.parts), torch.float32, ctx)
        found.setdefault(phase_of(exchange, ctx), set()).add(rounds)
    return found


@looped(("text", "world"), product(TEXTS, WORLDS), few=len(TEXTS))
def test_in_all_steps_of_a_phase_a_recipe_has_the_same_rounds(text: str, world: int) -> None:
    exchange = composed(text).exchange
    for name, unit in contexts(world):
        found = travels(exchange, unit)
        assert None not in found, "a recipe of ours has to be asked in no step"
        assert {phase: len(rounds) for phase, rounds in found.items()} == dict.fromkeys(found, 1), name
        assert len(found) <= MOST


RAMP = ramp(top_k, 0.01, 8)
HELD = {
    "gather, coded": gather(sparse_coded(RAMP, blocks("int8"))),
    "reduce": reduce(values(ramp(random_k, 0.01, 8))),
    "scatter": scatter_reduce(sparse(RAMP)),
    "leader": leader(RAMP),
    "ar_topk": ar_topk(RAMP, "variance"),
    "ar_topk, in turn": ar_topk(RAMP),
    "agreed": agreed(RAMP),
    "ok_topk": ok_topk(RAMP),
    "every": remember(every(2, leader(RAMP))),
    "warm": remember(warm(3, gather(sparse(RAMP)))),
}


@pytest.mark.parametrize("name", HELD)
def test_a_ratio_that_changes_within_any_exchange_has_phases(name: str) -> None:
    assert not HELD[name].laws.fixed_rounds
    for unit_name, unit in contexts(3):
        found = travels(HELD[name], unit)
        assert len(set().union(*found.values())) > 1, "it does change"
        assert all(len(rounds) == 1 for rounds in found.values()), unit_name


@pytest.mark.parametrize("world", [2, 3])
def test_the_better_election_is_a_phase_of_what_is_kept(world: int) -> None:
    exchange, steps = ar_topk(top_k(0.1), "auto"), 16 * world

    def rank(comm: Comm) -> list[tuple[Hashable, tuple[Round, ...]]]:
        kept, told = ExchangeState(), []
        for step in range(steps):
            ctx = replace(steady_context(256, world, step, kept), rank=comm.rank)
            # One rank alone has a gradient, so that its choice serves all: variance elects it.
            x, mean = torch.randn(256) * (comm.rank == 0), torch.zeros(256)
            told.append((phase_of(exchange, ctx), exchange.rounds(256, torch.float32, ctx)))
            run(exchange, x, mean, comm, ctx)
            kept.commit()
        return told

    first, *others = run_ranks(world, rank)
    assert all(other == first for other in others), "the same on all ranks"
    rounds = dict(first)
    assert all(rounds[phase] == of_step for phase, of_step in first)
    assert first[0][0] != first[-1][0], "ranks in turn are tried first, and the elected one is better"


@dataclass(frozen=True)
class Alternating:
    """A user's, which sends half of the elements in every second step."""

    laws = Laws(contractive=True)
    memory = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        raise NotImplementedError

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return (Round("all_reduce", numel // (1 + ctx.step % 2), dtype),)


@dataclass(frozen=True)
class Phased(Alternating):
    """The same, which says when it sends how many."""

    def phase(self, ctx: ExchangeContext) -> int:
        return ctx.step % 2


class AnyTopK(TopK):
    """A user's selector, which promises less."""

    laws = Laws(contractive=True, fixed_size=True)


def test_what_says_nothing_has_to_be_asked_in_every_step() -> None:
    ctx = steady_context(64, 2, 5)
    for exchange in (Alternating(), gather(sparse(AnyTopK(0.1))), remember(warm(3, Alternating()))):
        assert phase_of(exchange, ctx) is None
        assert not exchange.laws.fixed_rounds


def test_what_says_nothing_has_a_phase_where_something_else_runs() -> None:
    warming, resting = warm(3, Alternating()), every(2, Alternating(), order="paper")
    phases = [phase_of(warming, steady_context(64, 2, step)) for step in range(5)]
    assert phases == [phases[0]] * 3 + [None] * 2
    assert phases[0] is not None
    assert [phase_of(resting, steady_context(64, 2, step)) is None for step in range(4)] == [True, False] * 2


@pytest.mark.parametrize("exchange", [Phased(), remember(warm(3, Phased())), every(3, Phased())], ids=str)
def test_a_users_phases_are_passed_on(exchange: Exchange) -> None:
    for _name, unit in contexts(2):
        found = travels(exchange, unit)
        assert None not in found
        assert all(len(rounds) == 1 for rounds in found.values())


def test_a_schedule_that_changes_nothing_leaves_rounds_fixed() -> None:
    for exchange in (remember(dense()), warm(0, remember(dense())), every(1, dense())):
        assert exchange.laws.fixed_rounds
    for exchange in (warm(1, dense()), every(2, dense()), remember(acp_sgd()), remember(ar_topk(top_k(0.1)))):
        assert not exchange.laws.fixed_rounds


@looped("text", TEXTS)
def test_what_an_exchange_is_made_of_computes_its_laws_once(text: str) -> None:
    found: list[Any] = list(parts(composed(text).exchange))
    assert all(part.laws is part.laws for part in found)


def test_a_ratio_in_one_stage_is_fixed() -> None:
    assert ramp(top_k, 0.3, steps=8).laws.fixed_rounds
    assert not RAMP.laws.fixed_rounds
