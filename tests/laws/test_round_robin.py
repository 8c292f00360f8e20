"""Whose turn it is: no unit, leader or factor more often than another, none much later, and none never."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.exchange.base import STEADY, steady_context
from gradwire.exchange.compose import Scheme, every
from gradwire.exchange.dense import dense
from gradwire.exchange.leader import leader_in_turn
from gradwire.exchange.round_robin import BLOCK
from gradwire.unit.context import ExchangeContext
from tests.laws.cases import EXCHANGES, ExchangeCase
from tests.support.looped import looped
from tests.support.rig import Rig, gradients

INTERVALS = range(2, 9)
SEEDS = range(4000)
every_interval = looped("interval", INTERVALS)


def sends(exchange: Scheme, step: int, unit: int = 0, seed: int = 0) -> bool:
    return exchange.now(ExchangeContext(step, unit, 0, 2, seed)) is not None


def turns(exchange: Scheme, steps: range, unit: int = 0, seed: int = 0) -> list[int]:
    """The steps in which the unit travels."""
    return [step for step in steps if sends(exchange, step, unit, seed)]


@looped("case", EXCHANGES)
def test_a_unit_travels_once_in_each_declared_cycle(case: ExchangeCase) -> None:
    cycle = case.exchange.laws.cycle
    first = STEADY - STEADY % cycle
    for unit, begin in product(range(3), (first, first + cycle)):
        steps = [replace(steady_context(256, 4, begin + n), unit=unit) for n in range(cycle)]
        assert sum(bool(case.exchange.rounds(256, torch.float32, ctx)) for ctx in steps) == 1


@every_interval
@looped("seed", [0, 1, 77])
def test_a_step_sends_one_class_of_units_and_a_cycle_each_class_once(interval: int, seed: int) -> None:
    exchange, cycles = every(interval, dense()), 4 * BLOCK
    sent = []
    for step in range(cycles * interval):
        classes = {unit % interval for unit in range(3 * interval) if sends(exchange, step, unit, seed)}
        assert all(sends(exchange, step, unit, seed) for each in classes for unit in (each, each + interval))
        sent.append(*classes)
    for cycle in range(cycles):
        assert sorted(sent[cycle * interval : (cycle + 1) * interval]) == list(range(interval))


@every_interval
def test_the_papers_order_is_the_papers(interval: int) -> None:
    exchange = every(interval, dense(), order="paper")
    for step, unit, seed in product(range(5 * interval), range(2 * interval), (0, 9)):
        assert sends(exchange, step, unit, seed) is ((unit + step) % interval == 0)


@every_interval
def test_together_all_units_travel_in_the_same_step_of_each_cycle(interval: int) -> None:
    exchange = every(interval, dense(), together=True)
    for cycle in range(4 * BLOCK):
        steps = range(cycle * interval, (cycle + 1) * interval)
        first, *others = (turns(exchange, steps, unit) for unit in range(5))
        assert len(first) == 1
        assert all(other == first for other in others)


def mean_wait(interval: int) -> Fraction:
    """Steps that a gradient waits, if it may come in any step: (I - 1)/2 + (I² - 1)/(12·I·BLOCK).

    One of g steps between two turns waits g/2 - 1/2 in the mean over them, so that the mean over all steps is
    E[g²]/(2·E[g]) - 1/2. Within a block g = I. Between two blocks g = I + b - a, and each of a and b is
    any of 0 … I - 1.
    """
    inside = [Fraction(interval)] * interval**2 * (BLOCK - 1)
    between = [Fraction(interval + b - a) for a, b in product(range(interval), repeat=2)]
    gaps = inside + between
    return sum(gap**2 for gap in gaps) / (2 * sum(gaps)) - Fraction(1, 2)


@every_interval
def test_the_mean_wait_is_within_a_tenth_of_the_papers(interval: int) -> None:
    expected = mean_wait(interval)
    assert expected == Fraction(interval - 1, 2) + Fraction(interval**2 - 1, 12 * interval * BLOCK)
    assert expected < Fraction(11, 10) * Fraction(interval - 1, 2)
    blocks = 4000
    went = turns(every(interval, dense()), range(blocks * BLOCK * interval))
    gaps = [b - a for a, b in pairwise(went)]
    assert set(gaps) <= set(range(1, 2 * interval))
    assert {1, 2 * interval - 1} <= set(gaps)
    found = sum(gap * (gap - 1) / 2 for gap in gaps) / sum(gaps)
    # E[d²]/(2·BLOCK·I) of it is by chance, where d is the difference of two phases. d² is at most (I - 1)²,
    # and neighbours share a phase: 4 standard errors of the mean of half as many.
    bound = 4 * (interval - 1) ** 2 / (2 * BLOCK * interval) * (blocks / 2) ** -0.5
    assert found == pytest.approx(float(expected), abs=bound)


@looped(("coefficient", "percent"), [(0.5, 46.1), (0.6, 53.4), (0.8, 72.7), (1.0, 100.0)])
def test_what_a_coefficient_leaves_of_a_gradient_is_a_little_less_than_in_the_papers_order(
    coefficient: float, percent: float
) -> None:
    # After g steps a unit brings 1 + c + … + c^(g-1) of a constant gradient (tests/laws/test_memory.py).
    interval, blocks = 4, 4000
    brought = [sum(coefficient**age for age in range(gap)) for gap in range(2 * interval)]
    between = [brought[interval + b - a] for a, b in product(range(interval), repeat=2)]
    expected = ((BLOCK - 1) * brought[interval] + sum(between) / len(between)) / (BLOCK * interval)
    assert 100 * expected == pytest.approx(percent, abs=0.05)
    went = turns(every(interval, dense()), range(blocks * BLOCK * interval))
    found = sum(brought[b - a] for a, b in pairwise(went)) / (went[-1] - went[0])
    # Between blocks it is anything from brought[1] to brought[2I - 1]; as above, 4 standard errors.
    spread = (brought[-1] - brought[1]) / (BLOCK * interval)
    assert found == pytest.approx(expected, abs=4 * spread * (blocks / 2) ** -0.5 + 1 / blocks)


@every_interval
@looped("period", [1, 2, 3, 4, 6, 7, 12, 24], few=1)
def test_a_unit_that_is_trained_in_one_class_of_steps_is_seldom_missed_for_long(
    interval: int, period: int
) -> None:
    """Trained in k cycles, whatever the steps: with a probability of at most (1 - 1/I)^⌈k/BLOCK⌉."""
    exchange = every(interval, dense())
    for k in (1, BLOCK, 2 * BLOCK + 1):
        missed = 0
        for seed in SEEDS:
            step, cycles, hit = 5 * interval + seed % period, set[int](), False
            while len(cycles | {step // interval}) <= k and not hit:
                cycles.add(step // interval)
                hit = sends(exchange, step, seed % interval, seed)
                step += period
            missed += not hit
        bound = (1 - 1 / interval) ** -(-k // BLOCK)
        # 4 standard errors of as many draws; seeds are fixed, so that it passes or fails for good.
        assert missed / len(SEEDS) <= bound + 4 * (bound * (1 - bound) / len(SEEDS)) ** 0.5


@every_interval
def test_a_unit_that_is_trained_once_in_a_cycle_is_missed_exactly_as_seldom(interval: int) -> None:
    exchange, cycles = every(interval, dense()), 4 * BLOCK
    missed = Counter[int]()
    for seed in SEEDS:
        hits = [sends(exchange, cycle * interval, seed=seed) for cycle in range(cycles)]
        missed[hits.index(True) if True in hits else cycles] += 1
    for blocks in range(5):
        found = sum(times for first, times in missed.items() if first >= blocks * BLOCK) / len(SEEDS)
        law = (1 - 1 / interval) ** blocks
        assert found == pytest.approx(law, abs=4 * (law * (1 - law) / len(SEEDS)) ** 0.5)


HALVES = (("first.weight", "last.bias", "scalar"), ("middle.weight", "last.weight", "first.bias"))


def moved(text: str, steps: int, apart: bool = False) -> list[dict[str, Tensor]]:
    """Elements that have ever moved on each of two ranks, of two parts trained in turn.

    If they are `apart`, rank 0 has gradients of even elements only, and rank 1 of odd ones.
    """

    def rank(comm: Comm) -> dict[str, Tensor]:
        rig = Rig(comm, text)
        ever: dict[str, Tensor] = {}
        for step in range(steps):
            grads = gradients(comm.rank, step)
            if apart:
                for values in grads.values():
                    values[1 - comm.rank :: 2] = 0.0
            for name in HALVES[step % 2]:
                grads[name] = torch.zeros_like(grads[name])
            outcome = rig.step(grads)
            assert outcome.step.committed, outcome.error
            for name, mean in outcome.mean.items():
                ever[name] = ever.get(name, torch.zeros_like(mean, dtype=torch.bool)) | (mean != 0)
        return ever

    return run_ranks(2, rank)


@looped("text", ["covap(interval=2)", "covap(interval=4)", "local_every(interval=2)"])
def test_every_element_of_two_parts_that_are_trained_in_turn_moves(text: str) -> None:
    first, second = moved(text, steps=80)
    for name, ever in first.items():
        assert ever.all(), name
        assert torch.equal(ever, second[name])


@looped("text", ["covap(interval=2, order=paper)", "local_every(interval=2, order=paper)"])
def test_in_the_papers_order_some_elements_of_such_parts_never_move(text: str) -> None:
    for ever in moved(text, steps=80):
        assert not all(each.all() for each in ever.values())


RANKS = looped("world", [1, 2, 3, 4, 5, 8])


@RANKS
@looped("seed", [0, 1, 77])
def test_each_rank_leads_once_in_as_many_steps(world: int, seed: int) -> None:
    leaders = [leader_in_turn(ExchangeContext(step, 0, 0, world, seed)) for step in range(4 * BLOCK * world)]
    for first in range(0, len(leaders), world):
        assert sorted(leaders[first : first + world]) == list(range(world))


@RANKS
def test_a_unit_that_travels_or_is_trained_in_every_nth_step_has_all_leaders(world: int) -> None:
    for start in range(world):
        trained = range(start, 100 * BLOCK * world, world)
        assert {leader_in_turn(ExchangeContext(step, 0, 0, world)) for step in trained} == set(range(world))
        # An order within an order: that of leaders is drawn by itself.
        travels = turns(every(world, dense()), range(100 * BLOCK * world), unit=start)
        assert {leader_in_turn(ExchangeContext(step, start, 0, world)) for step in travels} == set(
            range(world)
        )


LEADERS = ["leader_topk(ratio=0.25)", "star_topk(ratio=0.25)", "scalecom(rate=4, warmup_steps=0)"]


@looped("text", LEADERS)
def test_what_only_one_rank_has_of_parts_trained_in_turn_moves(text: str) -> None:
    # With one leader for a part, what only the other rank has is never chosen.
    first, second = moved(text, steps=80, apart=True)
    for name, ever in first.items():
        assert ever.all(), name
        assert torch.equal(ever, second[name])


MATRICES = {"tall": (8, 6), "wide": (6, 8)}
GROWS = 1.9
"""Of twice as many steps; what grows without bound in proportion to them grows twofold."""


def unsent_norms(text: str, period: int) -> list[dict[str, float]]:
    """After each of 400 steps, in which two matrices have a constant gradient once in a `period`, in turn."""

    def rank(comm: Comm) -> list[dict[str, float]]:
        rig, norms = Rig(comm, text, shapes=MATRICES, policy=lambda _: None), []
        for step in range(400):
            grads = {}
            for number, (name, shape) in enumerate(MATRICES.items()):
                random = torch.Generator().manual_seed(number)
                gradient = torch.randn(torch.Size(shape).numel(), generator=random)
                grads[name] = gradient if step % period == number else torch.zeros_like(gradient)
            outcome = rig.step(grads, [tuple(MATRICES)])
            assert outcome.step.committed, outcome.error
            norms.append({name: float(left.norm()) for name, left in outcome.memory.items()})
        return norms

    return run_ranks(2, rank)[0]


@looped(("period", "rank"), product((2, 4), (1, 2)), few=1)
def test_the_memory_of_matrices_trained_in_turn_is_bounded_where_both_factors_are_sent(
    period: int, rank: int
) -> None:
    drawn, papers = (unsent_norms(f"acpsgd(rank={rank}{order})", period) for order in ("", ", order='paper'"))
    for name in MATRICES:
        first, later = ([norms[name] for norms in half] for half in (drawn[:200], drawn[200:]))
        assert max(later) < 1.5 * max(first)
        assert papers[399][name] > GROWS * papers[199][name]
        assert papers[399][name] > 2 * max(later)
