"""AR-Topk: who leads, what is sent, and the gain that decides between two ways to elect."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.comm import Round, ThreadComm, run_ranks
from gradwire.exchange.ar_topk import CYCLE, MARGIN, ar_topk, gain, in_turn, norms_of, note
from gradwire.exchange.base import run
from gradwire.exchange.leader import leader_in_turn, leads
from gradwire.exchange.payloads import gather
from gradwire.exchange.state import times_led
from gradwire.measure.metered import MeteredComm
from gradwire.unit.context import ExchangeContext, ExchangeState, Part
from tests.support.looped import looped
from tests.support.steps import step

WORLDS = (1, 2, 3, 4, 5, 7, 8)


def own_peak(rank: int) -> Tensor:
    """Largest at the element with the rank's number, so that the choice shows who made it."""
    x = torch.ones(10)
    x[rank] = 5.0
    return x


def chosen(results) -> int:
    choices = {int(result.mean.nonzero().item()) for result in results}
    assert len(choices) == 1
    return choices.pop()


@looped("world", WORLDS)
def test_ranks_lead_in_turn(world: int) -> None:
    leaders = [chosen(step(ar_topk(top_k(0.1)), own_peak, world, number)) for number in range(2 * world)]
    assert leaders == [leader_in_turn(ExchangeContext(number, 0, 0, world)) for number in range(2 * world)]


@looped("world", WORLDS)
def test_largest_variance_leads(world: int) -> None:
    for loudest in range(world):
        results = step(
            ar_topk(top_k(0.1), "variance"),
            lambda rank, loudest=loudest: own_peak(rank) * (3.0 if rank == loudest else 1.0),
            world,
            number=world + 1,
        )
        assert chosen(results) == loudest


def test_variance_is_that_of_the_chosen_elements() -> None:
    # The other way round than by the norm of the whole vector.
    flat, peak = torch.full((100,), 1.0), torch.zeros(100)
    peak[7] = 9.0
    results = step(ar_topk(top_k(0.01), "variance"), [flat, peak].__getitem__, 2)
    assert chosen(results) == 7


def test_rounds() -> None:
    f32, i32 = torch.float32, torch.int32
    context = ExchangeContext(step=6, unit=0, rank=0, world=4)
    values = Round("all_reduce", 100, f32, algorithm="tree")
    words = 18  # of 100 in 1000 coded indices
    assert ar_topk(top_k(0.1), algorithm="tree").rounds(1000, f32, context) == (
        Round("broadcast", words, i32, src=2, algorithm="scatter"),
        values,
    )
    assert ar_topk(top_k(0.1), "variance", algorithm="tree").rounds(1000, f32, context) == (
        Round("all_gather", 1, f32),
        Round("all_reduce", words, i32),
        values,
    )
    # Two norms behind the values.
    assert ar_topk(top_k(0.1), "auto", torch.float16).rounds(1000, f32, context)[-1].numel == 102


def trained(world: int, gradient, steps: int) -> list[tuple[list[bool], list[int]]]:
    """By rank: in which steps of `auto` ranks led in turn, and how often each has led; with a residual."""
    exchange = ar_topk(top_k(0.05), "auto")

    def body(comm: ThreadComm) -> tuple[list[bool], list[int]]:
        kept, memory, ways = ExchangeState(), torch.zeros(400), []
        for number in range(steps):
            metered, ctx = MeteredComm(comm), ExchangeContext(number, 0, comm.rank, comm.world, kept=kept)
            memory += gradient(comm.rank, number)
            run(exchange, memory, torch.empty(400), metered, ctx)
            ways.append(metered.rounds[0].verb == "broadcast")
            kept.commit()
        return ways, times_led([kept])

    return run_ranks(world, body)


def test_auto_elects_by_variance_where_one_rank_has_nearly_all() -> None:
    def gradient(rank: int, number: int) -> Tensor:
        draw = torch.Generator().manual_seed(100 * number + rank)
        return torch.randn(400, generator=draw) ** 3 * (20.0 if rank == 1 else 0.01)

    ways, led = trained(2, gradient, 48)[0]
    assert trained(2, gradient, 48)[1] == (ways, led)
    # In turn half of the steps would be rank 0's.
    assert led[1] > 2 * led[0]
    assert sum(led) == 48


def bytes_per_rank(exchange, world: int, numel: int = 100_000) -> float:
    """As predicted, which is what is metered."""
    ctx = ExchangeContext(0, 0, 0, world)
    predicted = sum(each.wire_bytes(world) for each in exchange.rounds(numel, torch.float32, ctx))

    def body(comm: ThreadComm) -> float:
        draw = torch.Generator().manual_seed(comm.rank)
        x, metered = torch.randn(numel, generator=draw), MeteredComm(comm)
        run(exchange, x, torch.empty_like(x), metered, ExchangeContext(0, 0, comm.rank, comm.world))
        return metered.wire_bytes

    assert run_ranks(world, body) == [pytest.approx(predicted, rel=1e-12)] * world
    return predicted


@looped("elect", ["round_robin", "variance", "auto"])
@looped("algorithm", ["library", "ring", "tree", "star"])
def test_traffic_per_rank_is_bounded_while_that_of_an_all_gather_grows(elect, algorithm) -> None:
    exchange = ar_topk(top_k(0.01), elect, algorithm=algorithm)
    two, eight = bytes_per_rank(exchange, 2), bytes_per_rank(exchange, 8)
    # (N-1)/N of twice the payload: from 1 to 7/4 of it, and never 2. Norms are 4(N-1) bytes.
    assert eight - 4 * 7 <= 7 / 4 * two
    gathered = gather(sparse(top_k(0.01)))
    assert bytes_per_rank(gathered, 8) == pytest.approx(7 * bytes_per_rank(gathered, 2))
    assert eight < 0.3 * bytes_per_rank(gathered, 8)


def test_unknown_options_raise() -> None:
    with pytest.raises(ValueError, match="none of round_robin, variance, auto"):
        ar_topk(top_k(0.1), "norm")
    with pytest.raises(ValueError, match="none of library, ring, tree, star"):
        ar_topk(top_k(0.1), algorithm="mesh")
    with pytest.raises(ValueError, match="none of library, scatter"):
        ar_topk(top_k(0.1), broadcast="tree")


WORLD = 3
TRIAL = 2 * WORLD


def ctx(step: int, kept: ExchangeState, unit: int = 0, world: int = WORLD) -> ExchangeContext:
    return ExchangeContext(step, unit, 0, world, kept=kept, parts=(Part("weight", (10,), 0, 10),))


def lead(kept: ExchangeState, steps: range, gains: tuple[float, float]) -> list[bool]:
    """Which of `steps` went in turn, when going in turn gains gains[0] and electing by variance gains[1]."""
    ways = []
    for number in steps:
        context = ctx(number, kept)
        ways.append(in_turn("auto", context))
        note(context, number % WORLD, gains[0] if ways[-1] else gains[1])
        kept.commit()
    return ways


@looped(("gains", "better"), [((0.5, 0.6), False), ((0.6, 0.5), True), ((0.5, 0.505), True)])
def test_both_ways_are_tried_and_the_better_one_leads_until_the_next_cycle(gains, better: bool) -> None:
    cycle = [True] * TRIAL + [False] * TRIAL + [better] * (CYCLE * WORLD - 2 * TRIAL)
    assert lead(ExchangeState(), range(2 * CYCLE * WORLD), gains) == cycle * 2


def test_auto_changes_its_mind_when_gains_change() -> None:
    kept, cycle = ExchangeState(), CYCLE * WORLD
    assert not any(lead(kept, range(cycle), (0.5, 0.9))[2 * TRIAL :])
    assert all(lead(kept, range(cycle, 2 * cycle), (0.9, 0.5))[2 * TRIAL :])


def test_what_the_memories_had_left_from_the_other_way_does_not_count() -> None:
    kept = ExchangeState()
    for number in range(2 * TRIAL):
        settling = number % TRIAL < WORLD
        note(ctx(number, kept), 0, 1.0 if settling and number < TRIAL else 0.5 if number < TRIAL else 0.6)
        kept.commit()
    assert not in_turn("auto", ctx(2 * TRIAL, kept))


def test_a_small_advantage_does_not_pay_for_a_round() -> None:
    assert MARGIN > 1
    better = 0.5 * MARGIN * 1.001
    assert not any(lead(ExchangeState(), range(CYCLE * WORLD), (0.5, better))[2 * TRIAL :])


def test_without_measurements_ranks_lead_in_turn() -> None:
    # As after a change of world, or a plan that began in the middle of a cycle.
    kept = ExchangeState()
    note(ctx(0, kept, world=5), 4, 0.3)
    kept.commit()
    assert in_turn("auto", ctx(2 * TRIAL + 1, kept))


def test_a_step_that_is_not_committed_leaves_no_trace() -> None:
    kept = ExchangeState()
    note(ctx(0, kept), 2, None)
    kept.discard()
    assert times_led([kept]) is None


def test_times_led_add_up_over_units_and_flat_buffers() -> None:
    flat_buffers = [ExchangeState(), ExchangeState()]
    for kept, unit, leader in [(0, 0, 2), (0, 1, 2), (1, 0, 0), (0, 0, 1)]:
        note(ctx(0, flat_buffers[kept], unit), leader, None)
        flat_buffers[kept].commit()
    assert times_led(flat_buffers) == [1, 1, 2]
    assert times_led([ExchangeState()]) is None


@looped("world", [1, 2, 3, 5])
def test_largest_norm_wins_and_the_lowest_rank_among_equals(world: int) -> None:
    for winner in range(world):
        norms = [2.0 if rank >= winner else 1.0 for rank in range(world)]

        def is_elected(comm: ThreadComm, norms: list[float] = norms) -> bool | Tensor:
            return leads(norms_of(torch.full((4,), norms[comm.rank]), comm), comm.rank)

        assert run_ranks(world, is_elected) == [rank == winner for rank in range(world)]


@looped(
    ("norms", "expected"),
    [
        ((5.0, 10.0), 0.25),
        ((0.0, 2.0), 0.0),
        ((0.0, 0.0), 1.0),
        ((math.nan, 1.0), 0.0),
        ((math.inf, math.inf), 0.0),
    ],
)
def test_gain_is_a_share_whatever_the_norms(norms: tuple[float, float], expected: float) -> None:
    assert gain(*norms) == expected
