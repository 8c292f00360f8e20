"""Late, not lost: what error feedback does over many steps, for everything that `remember` accepts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gradwire.codec.blocks import blocks
from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse, values
from gradwire.comm import ThreadComm, run_ranks
from gradwire.contrib.gtopk import gtop_k
from gradwire.contrib.oktopk import ok_topk
from gradwire.contrib.randomk import random_k
from gradwire.contrib.sketchsgd import sketch
from gradwire.contrib.stochastic_levels import qsgd_codec, tern_grad
from gradwire.exchange.ar_topk import ar_topk
from gradwire.exchange.base import Exchange, run
from gradwire.exchange.compose import Scheme, every, remember
from gradwire.exchange.dense import dense
from gradwire.exchange.leader import leader
from gradwire.exchange.payloads import gather, reduce
from gradwire.exchange.scatter_reduce import scatter_reduce
from gradwire.memory import Memory, Residual
from gradwire.unit.context import ExchangeContext
from tests.laws.cases import EXCHANGES, ExchangeCase, ScaledRandomK
from tests.support.compensation import Compensation
from tests.support.depth import drawn
from tests.support.gradients import generator
from tests.support.looped import looped

WORLD, SIZE, STEPS = 3, 64, 60


@dataclass(frozen=True)
class History:
    """What one rank saw over all steps; norms in float64."""

    residual_norms: list[float]
    gradient_norms: list[float]
    delivered: Tensor
    came: Tensor
    residual: Tensor


def feed_back(exchange: Exchange, memory: Memory, steps: int = STEPS, size: int = SIZE) -> list[History]:
    """`steps` steps with the memory added before and kept after, as the flat buffers do it."""

    def body(comm: ThreadComm) -> History:
        random = generator("feedback", comm.rank)
        trend = torch.randn(size, generator=random)
        planes, mean = Compensation(memory, size), torch.empty(size)
        delivered, came = torch.zeros(size).double(), torch.zeros(size).double()
        residuals, gradients = [], []
        for step in range(steps):
            gradient = trend + torch.randn(size, generator=random)
            run(
                exchange,
                planes.compensate(gradient, step, WORLD),
                mean,
                comm,
                ExchangeContext(step, 0, comm.rank, WORLD),
            )
            planes.commit()
            delivered += mean
            came += gradient
            residuals.append(planes.unsent.double().norm().item())
            gradients.append(gradient.double().norm().item())
        return History(residuals, gradients, delivered, came, planes.unsent)

    return run_ranks(WORLD, body)


@functools.cache
def fed_back(case: ExchangeCase) -> tuple[History, ...]:
    """What several tests look at."""
    return tuple(feed_back(remember(case.exchange), Residual()))


accepted = [case for case in EXCHANGES if case.exchange.laws.contractive]
accepted = [case for case in accepted if case in drawn(accepted, len(accepted) // 8, "memory")]
by_kind = functools.partial(looped, "case", by=lambda case: case.kind)


@by_kind(accepted)
def test_residual_never_exceeds_what_came(case: ExchangeCase) -> None:
    # ‖r'‖ ≤ ‖r + g‖ ≤ ‖r‖ + ‖g‖ if nothing is left that was not there: at most the sum of all norms.
    # 1e-5: three float32 roundings per step and element, relative to x, over 60 steps.
    for history in fed_back(case):
        total = 0.0
        for residual, gradient in zip(history.residual_norms, history.gradient_norms, strict=True):
            total += gradient
            assert residual <= total * (1 + 1e-5)


@by_kind([case for case in accepted if case.exchange.laws.conserves])
def test_what_was_delivered_and_what_is_left_add_up_to_what_came(case: ExchangeCase) -> None:
    histories = fed_back(case)
    came = torch.stack([history.came for history in histories]).mean(0)
    left = torch.stack([history.residual.double() for history in histories]).mean(0)
    # Per step and element W + 4 roundings of the accumulating type plus two of the compensation, each
    # relative to an error-fed gradient that is no larger than all that came so far, at most 60 steps of it.
    u = max(torch.finfo(dtype).eps for dtype in (torch.float32, case.sums_in or torch.float32)) / 2
    largest = max(max(history.residual_norms) for history in histories) + 8.0
    bound = STEPS * (WORLD + 6) * u * largest
    assert (histories[0].delivered + left - came).abs().max() <= bound


PLATEAUS = {
    # Residual at most √γ/(1 − √γ) of the largest gradient for a contraction γ in every step
    # (Karimireddy et al. 2019, lemma 3), below 2/δ with δ = 1 − γ the share that is sent.
    "top 25%": (gather(sparse(top_k(0.25))), 2 / 0.25),
    # Random: the bound holds in the mean square; twice it for one draw of 60 steps.
    "random 25%": (reduce(values(random_k(0.25))), 2 * 2 / 0.25),
    # A rank that does not lead contracts only as far as choices overlap, but each leads once in W steps, and
    # waits for 2W - 1 at most.
    "leader 25%": (leader(top_k(0.25)), (2 * WORLD - 1) * 2 / 0.25),
    # As the leader: in turn by construction, by variance as what is not chosen makes a rank's own larger.
    "ar 25%": (ar_topk(top_k(0.25)), (2 * WORLD - 1) * 2 / 0.25),
    "ar 25% variance": (ar_topk(top_k(0.25), "variance"), WORLD * 2 / 0.25),
    "ar 25% auto": (ar_topk(top_k(0.25), "auto"), (2 * WORLD - 1) * 2 / 0.25),
    # What cancels between ranks waits while they disagree: nothing bounds that but the sum of all gradients.
    # Gradients that are independent of each other stay below the bound of a leader.
    "ok 25%": (ok_topk(top_k(0.25)), WORLD * 2 / 0.25),
    "gtop 25%": (gtop_k(0.25), WORLD * 2 / 0.25),
    "sketch 25%": (sketch(0.25), WORLD * 2 / 0.25),
    # With q = 2√γ + γ what all ranks keep is at most q/(1 − q) of what all of them bring (`ScatterReduce`):
    # 0.036, 0.71 and 0.13 for shards of 22 elements.
    "scatter int8": (scatter_reduce(blocks("int8")), WORLD * 0.036 / 0.964),
    "scatter int4": (scatter_reduce(blocks("int4")), WORLD * 0.73 / 0.27),
    "scatter fp8": (scatter_reduce(blocks("fp8")), WORLD * 0.13 / 0.87),
    # At most 2I − 2 gradients wait from one block of cycles to the next, and I − 1 in the paper's order.
    "every 4": (every(4, dense()), 6.0),
    "every 4 in the paper's order": (every(4, dense(), order="paper"), 3.0),
}


@looped("name", PLATEAUS, few=2)
def test_residual_reaches_a_plateau(name: str) -> None:
    exchange, bound = PLATEAUS[name]
    for history in feed_back(remember(exchange), Residual(), steps=200):
        assert max(history.residual_norms) <= bound * max(history.gradient_norms)
        # The last quarter is no larger than what came before, but for chance.
        assert max(history.residual_norms[150:]) <= 1.25 * max(history.residual_norms[:150])


def test_remember_refuses_what_is_not_contractive_and_says_why() -> None:
    for exchange in (reduce(ScaledRandomK(0.1)), every(2, gather(ScaledRandomK(0.1)))):
        with pytest.raises(ValueError, match=r"not contractive.*grows without bound"):
            remember(exchange)


def test_what_it_refuses_would_diverge() -> None:
    # Without the guard: the same 60 steps that everything accepted survives.
    forced = Scheme(reduce(ScaledRandomK(0.1)), Residual())
    for history in feed_back(forced, Residual()):
        assert history.residual_norms[-1] > 1e3 * sum(history.gradient_norms)


LARGE = 2048
"""Four of QSGD's buckets; what a maximum over all elements scales errs more, the more there are."""


@looped("bits", [2, 4])
def test_qsgd_of_few_bits_is_refused_and_would_diverge(bits: int) -> None:
    exchange = gather(qsgd_codec(bits))
    with pytest.raises(ValueError, match="not contractive"):
        remember(exchange)
    for history in feed_back(Scheme(exchange, Residual()), Residual(), size=LARGE):
        # More is left than ever came: no codec that is a contraction can do that.
        assert history.residual_norms[-1] > 2 * sum(history.gradient_norms)


def test_qsgd_of_8_bits_stays_where_its_contraction_keeps_it() -> None:
    exchange = remember(gather(qsgd_codec(8)))
    # γ = d/s² in every draw, and at most √γ/(1 − √γ) of the largest gradient waits; 1 % for roundings.
    root = 512**0.5 / 127
    for history in feed_back(exchange, Residual(), size=LARGE):
        assert max(history.residual_norms) <= 1.01 * root / (1 - root) * max(history.gradient_norms)


def test_tern_grad_is_refused_and_would_leave_many_gradients_behind() -> None:
    exchange = gather(tern_grad())
    with pytest.raises(ValueError, match="not contractive"):
        remember(exchange)
    # No element errs by more than the largest, so that the maximum grows by no more than a gradient's in a
    # step: slowly, and to a size at which magnitudes are nearly equal, where signs alone say everything.
    for history in feed_back(Scheme(exchange, Residual()), Residual(), size=LARGE):
        assert history.residual_norms[-1] > 5 * max(history.gradient_norms)


@looped(("coefficient", "percent"), [(0.5, 46.875), (0.6, 54.4), (0.8, 73.8), (1.0, 100.0)])
def test_interval_delivers_the_mass_that_the_coefficient_leaves(coefficient: float, percent: float) -> None:
    # (1 + c + … + c^(I-1)) / I of a constant gradient's mass, the figures of COVAP's schedule at I = 4 where
    # a unit waits for I steps each time.
    interval, cycles = 4, 5
    assert 100 * sum(coefficient**i for i in range(interval)) / interval == pytest.approx(percent)

    def body(comm: ThreadComm) -> float:
        exchange = remember(every(interval, dense(), order="paper"), Residual(start=coefficient))
        assert exchange.memory is not None
        planes, mean = Compensation(exchange.memory, 5), torch.empty(5)
        delivered = 0.0
        for step in range(1, interval * cycles + 1):  # the first cycle is complete, too
            x = planes.compensate(torch.ones(5), step, comm.world)
            run(exchange, x, mean, comm, ExchangeContext(step, 0, comm.rank, comm.world))
            planes.commit()
            delivered += mean[0].item()
        return 100 * delivered / (interval * cycles)

    # Four float32 roundings and those of the coefficient's powers: a relative 8·2^-24 at most.
    assert run_ranks(2, body) == pytest.approx([percent] * 2, rel=5e-7)


@looped("interval", [2, 3, 4])
def test_a_cycle_of_covap_is_a_contraction_in_the_mean_of_its_phases(interval: int) -> None:
    # A unit's phase is as likely as any other: 1 - 1/I of a vector is left in the mean over a cycle of steps.
    x = torch.randn(300)

    def rank(comm: ThreadComm) -> list[Tensor]:
        kept = []
        for step in range(interval):
            mine, mean = x.clone(), torch.zeros_like(x)
            exchange, ctx = every(interval, dense()), ExchangeContext(step, 5, comm.rank, comm.world)
            if exchange.rounds(mine.numel(), mine.dtype, ctx):
                run(exchange, mine, mean, comm, ctx)
            kept.append(mine)
        return kept

    for kept in run_ranks(2, rank):
        left = [float(mine.square().sum()) for mine in kept]
        assert sum(left) / interval == pytest.approx((1 - 1 / interval) * float(x.square().sum()))
