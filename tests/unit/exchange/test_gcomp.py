"""Compressed frames in a ring: nothing lost, or no more than the bound says; tables that ranks agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.codec.gcomp import SYMBOLS, CodeTable, table_of
from gradwire.comm import Round, ThreadComm, run_ranks
from gradwire.errors import WireError
from gradwire.exchange.base import run
from gradwire.exchange.gcomp import Gcomp, gcomp
from gradwire.measure.metered import MeteredComm
from gradwire.metric import SHARE, numerators, thresholds
from gradwire.unit.context import ExchangeContext, ExchangeState, Part, Replicated
from tests.support.looped import looped
from tests.support.optimizers import CASES, Case, N, context_of, rest, stepped, trained
from tests.support.rig import NAMES, Rig, gradients
from tests.support.ring_order import ring_sum
from tests.support.rounds import allows
from tests.unit.metric.test_bound import half_a_step, ulp

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHORT = {"segment": 37}


def means(
    exchange: Gcomp, inputs: list[Tensor], ctx: Callable[[int], ExchangeContext] | None = None
) -> list[Tensor]:
    """What every rank applies."""
    world = len(inputs)

    def body(comm: ThreadComm) -> Tensor:
        x = inputs[comm.rank].clone()
        mean = torch.full_like(x, torch.nan)
        context = ctx(comm.rank) if ctx else ExchangeContext(0, 0, comm.rank, world)
        run(exchange, x, mean, comm, replace(context, rank=comm.rank, world=world))
        assert not x.any()
        return mean

    return run_ranks(world, body)


def the_mean(
    exchange: Gcomp, inputs: list[Tensor], ctx: Callable[[int], ExchangeContext] | None = None
) -> Tensor:
    """The same bits on all ranks."""
    first, *others = means(exchange, inputs, ctx)
    whole = torch.int32 if first.dtype == F32 else torch.int16
    assert all(torch.equal(first.view(whole), other.view(whole)) for other in others)
    return first


def plain_ring(inputs: list[Tensor]) -> Tensor:
    """The same sums in the same order, of numbers that were not encoded."""
    return ring_sum([x * (1.0 / len(inputs)) for x in inputs])


def awkward(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """All magnitudes down to the smallest subnormal, zeros, and what cancels."""
    random = torch.Generator().manual_seed(rank)
    info = torch.finfo(dtype)
    low, high = int(torch.tensor(info.smallest_normal).log2()) - 12, 3
    x = torch.randn(numel, generator=random) * 2.0 ** torch.randint(low, high, (numel,), generator=random)
    x[torch.rand(numel, generator=random) < 0.2] = 0.0
    x[::11] = 1.0 if rank % 2 else -1.0
    return x.to(dtype)


@looped(("dtype", "world"), product([F32, BF16, F16], range(2, 9)), few=4)
def test_lossless_is_a_plain_ring_to_the_last_bit(world: int, dtype: torch.dtype) -> None:
    for numel in (0, 1, world - 1, 1000):
        inputs = [awkward(rank, numel, dtype) for rank in range(world)]
        found = the_mean(replace(gcomp("lossless"), **SHORT), inputs)
        assert torch.equal(found, plain_ring(inputs)), numel


@looped("mode", ["near", "levels", "lossless", "truncate"])
def test_what_is_not_finite_arrives_everywhere(mode: Any) -> None:
    inputs = [torch.ones(60) for _ in range(3)]
    inputs[1][5], inputs[2][30], inputs[0][59] = torch.nan, torch.inf, -torch.inf
    found = the_mean(gcomp(mode), inputs)
    assert found[5].isnan()
    assert (found[30], found[59]) == (torch.inf, -torch.inf)
    assert found.isfinite().sum() == 57


def on_a_grid(rank: int, world: int, optimizer: torch.optim.Optimizer) -> Tensor:
    """Gradients (N,) of 13 significant bits, whose sums of whatever part are exact."""
    random = torch.Generator().manual_seed(1000 + rank)
    shared = torch.Generator().manual_seed(7)
    unit = 2.0 ** torch.randint(-40, -8, (N,), generator=shared)
    return torch.randint(-4096, 4097, (N,), generator=random) * unit * world


@looped(("mode", "world", "case"), product(["near", "levels"], [2, 3, 8], CASES), few=3)
def test_a_parameter_moves_by_less_ulp_than_there_are_ranks(case: Case, world: int, mode: Any) -> None:
    parameter, optimizer = trained(case, 10)
    ctx = context_of(parameter, optimizer)
    inputs = [on_a_grid(rank, world, optimizer) for rank in range(world)]
    exact = torch.stack(inputs).double().sum(0) / world
    found = the_mean(replace(gcomp(mode), **SHORT), inputs, lambda _rank: ctx).double()
    # W roundings, each of half a step at most.
    if mode == "near":
        half = 2.0 ** (thresholds(N, ctx).double() - 151)
    else:
        half = numerators(N, ctx).double() * 2.0**-24
    assert ((found - exact).abs() <= world * half).all()
    moved = (stepped(case, optimizer, found) - stepped(case, optimizer, exact)).abs()
    assert (moved <= world * case.factor * ulp(rest(optimizer))).all()
    # And it has not been sent as it was.
    assert (found != exact).float().mean() > 0.05


@looped(("mode", "dtype", "case"), product(["near", "levels"], [BF16, F16], CASES), few=4)
def test_in_sixteen_bits_by_less_than_so_many_parts_of_an_ulp(
    case: Case, dtype: torch.dtype, mode: Any
) -> None:
    parameter, optimizer = trained(case, 10, dtype=dtype)
    ctx = context_of(parameter, optimizer)
    # Of 6 significant bits: sums of three are exact in 8, and so are those of multiples of a step.
    shared = torch.Generator().manual_seed(7)
    unit = 2.0 ** torch.randint(-20, 0, (N,), generator=shared)
    inputs = [
        (torch.randint(-42, 43, (N,), generator=torch.Generator().manual_seed(rank)) * unit).to(dtype)
        for rank in range(4)
    ]
    exact = torch.stack(inputs).double().sum(0) / 4
    found = the_mean(replace(gcomp(mode), **SHORT), inputs, lambda _rank: ctx).double()
    if mode == "near":
        half = half_a_step(thresholds(N, ctx, dtype), dtype)
    else:
        half = numerators(N, ctx).double() * torch.finfo(dtype).eps / 2.0
    assert ((found - exact).abs() <= 4 * half).all()
    moved = (stepped(case, optimizer, found) - stepped(case, optimizer, exact)).abs()
    assert (moved <= 4 * SHARE[dtype] * case.factor * ulp(rest(optimizer), dtype)).all()
    assert mode == "levels" or (found != exact).float().mean() > 0.05


@looped("dtype", [BF16, F16])
def test_truncate_keeps_five_bits_of_any_type(dtype: torch.dtype) -> None:
    inputs = [torch.randn(300, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
    found = the_mean(gcomp("truncate"), inputs)
    dropped = 2 if dtype == BF16 else 5
    normal = found.abs() >= torch.finfo(dtype).smallest_normal
    assert not (found[normal].view(torch.int16) & (1 << dropped) - 1).any()
    assert (found[normal].view(torch.int16) & (1 << dropped)).any()


def test_no_hop_may_lose_what_the_metric_does_not_allow() -> None:
    # Without an optimizer nothing is known, so that nothing is lost.
    inputs = [awkward(rank, 500, F32).masked_fill(torch.arange(500) % 3 == 0, 0.25) for rank in range(3)]
    assert any(bool(((x != 0) & (x.abs() < 2.0**-126)).any()) for x in inputs)
    for mode in ("near", "levels"):
        found = the_mean(gcomp(mode), inputs)  # type: ignore[arg-type]
        assert torch.equal(found.view(torch.int32), plain_ring(inputs).view(torch.int32))


@looped("bits", [1, 18, 23])
def test_truncate_drops_as_many_bits_in_every_hop(bits: int) -> None:
    inputs = [torch.randn(300, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    found, exact = the_mean(gcomp("truncate", bits), inputs), torch.stack(inputs).double().mean(0)
    largest = torch.stack(inputs).double().abs().sum(0) / 4 * 2
    assert ((found - exact).abs() <= 4 * largest * 2.0 ** (bits - 24) + 4 * largest * 2.0**-24).all()
    assert not (found.view(torch.int32) & ((1 << bits) - 1)).any()


def parameters_of(rank: int, value: float) -> ExchangeContext:
    group = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    seen = Replicated(torch.full((90,), value), group, {}, torch.optim.SGD)
    return ExchangeContext(0, 0, rank, 3, replicas=lambda _name: seen)


def test_a_rank_with_other_parameters_is_found_out() -> None:
    inputs = [torch.randn(90) * 1e-3 for _ in range(3)]
    with pytest.raises(WireError, match="state"):
        means(gcomp("near"), inputs, lambda rank: parameters_of(rank, 4.0 if rank == 1 else 1.0))
    # Where only exponents count, the last bit of a parameter does not matter.
    the_mean(gcomp("near"), inputs, lambda rank: parameters_of(rank, 1.0 + rank * 2.0**-23))


def raising(_name: str) -> Replicated | None:
    raise ZeroDivisionError


@looped("step", [0, 1])
def test_a_rank_that_fails_keeps_the_order_and_raises_in_the_end(step: int) -> None:
    exchange = replace(gcomp("near"), **SHORT)

    def body(comm: ThreadComm) -> tuple[list[Round], Tensor]:
        x, metered = torch.ones(200), MeteredComm(comm)
        mean = torch.empty_like(x)
        ctx = ExchangeContext(step, 0, comm.rank, 3)
        ctx = replace(ctx, replicas=raising) if comm.rank == 1 else ctx
        decode = exchange.start(x, mean, metered, ctx)
        if comm.rank == 1:
            with pytest.raises(ZeroDivisionError):
                decode()
        else:
            decode()
        announced = exchange.rounds(200, F32, ctx)
        assert len(metered.rounds) == len(announced)
        assert all(allows(a, b) for a, b in zip(announced, metered.rounds, strict=True))
        return metered.rounds, mean

    for _rounds, mean in run_ranks(3, body):
        assert mean.isnan().all()


def steps_of(
    exchange: Gcomp, number: int, kept: list[ExchangeState], scale: float = 1e-3
) -> list[list[Round]]:
    """One step on two ranks; what they issued, and then the step is committed."""

    def body(comm: ThreadComm) -> list[Round]:
        drawn = torch.Generator().manual_seed(2 * number + comm.rank)  # ranks are threads
        x, metered = torch.randn(4000, generator=drawn) * scale, MeteredComm(comm)
        ctx = ExchangeContext(
            number, 0, comm.rank, 2, parts=(Part("w", (4000,), 0, 4000),), kept=kept[comm.rank]
        )
        run(exchange, x, torch.empty_like(x), metered, ctx)
        kept[comm.rank].commit()
        return metered.rounds

    return run_ranks(2, body)


def test_tables_are_made_of_what_all_ranks_have_sent_and_used_from_the_next_step_on() -> None:
    exchange, kept = gcomp("lossless", refresh=6), [ExchangeState(), ExchangeState()]
    counts = Round("all_reduce", SYMBOLS, torch.int64)
    rounds = [steps_of(exchange, number, kept)[0] for number in range(8)]
    assert [number for number, step in enumerate(rounds) if step[-1] == counts] == [0, 1, 2, 4, 7]
    made = [each.get("symbols from 0", "w") for each in kept]
    assert made[0] is not None
    assert made[1] is not None
    assert torch.equal(made[0], made[1])
    # Every rank encodes every partition once; of four older counts, a quarter each.
    assert 2 * 4000 * (1 - 4**-5) - SYMBOLS < int(made[0].sum()) * 3 / 4 <= 2 * 4000
    assert table_of(made[0]) == CodeTable.from_histogram(made[0]) != CodeTable.prior()
    sent = [sum(r.payload_bytes for r in step if r.dtype == torch.uint8) for step in rounds]
    assert sent[1] < 0.99 * sent[0]


@looped("period", [2, 3, 5], few=1)
def test_tables_serve_a_unit_that_rests_in_most_steps(period: int) -> None:
    def sent(exchange: Gcomp, busy: int) -> int:
        kept = [ExchangeState(), ExchangeState()]
        steps = [
            steps_of(exchange, step, kept, scale=1e-3 if step % period == busy else 0.0)[0]
            for step in range(60)
        ]
        return sum(r.payload_bytes for step in steps[20:] for r in step if r.dtype == torch.uint8)

    # Nothing but exponents and signs. Ten has a factor in common with two and with five.
    dynamic, static = (
        gcomp("truncate", bits=23, tables=tables, refresh=10) for tables in ("dynamic", "static")
    )
    for busy in range(period):
        assert sent(dynamic, busy) < sent(static, busy)


def test_static_tables_are_never_exchanged() -> None:
    exchange, kept = gcomp("lossless", tables="static"), [ExchangeState(), ExchangeState()]
    for step in range(2):
        assert all(r.verb == "shift" for r in steps_of(exchange, step, kept)[0])
    assert kept[0].committed == {}


def test_ranks_with_different_tables_are_found_out() -> None:
    kept = [ExchangeState(), ExchangeState()]
    counts = torch.zeros(SYMBOLS, dtype=torch.int64)
    counts[110:120] = 5
    kept[0].put("symbols from 0", "w", counts)
    kept[0].commit()
    with pytest.raises(WireError, match="table"):
        steps_of(gcomp("lossless"), 1, kept)


def test_frames_are_announced_no_larger_than_what_is_not_compressed() -> None:
    rounds = gcomp("lossless", tables="static").rounds(1_000_000, F32, ExchangeContext(0, 0, 0, 4))
    assert sum(r.payload_bytes for r in rounds) < 1.001 * 1.5 * 4_000_000


@looped(
    ("options", "named"),
    [
        ({"mode": "exact"}, "mode='exact'"),
        ({"tables": "some"}, "tables='some'"),
        ({"bits": 24}, "bits=24"),
        ({"refresh": 0}, "refresh=0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        gcomp(**options)


def test_units_that_begin_in_one_parameter_have_tables_of_their_own() -> None:
    def rank(comm: ThreadComm) -> tuple[int, int]:
        rig = Rig(comm, "gcomp(mode='truncate')", unit_elements=500)
        rig.step(gradients(comm.rank, 0))
        counted = [kind for _name, kind in rig.planes if kind.startswith("symbols from")]
        return len(counted), sum(len(flat_buffer.units) for flat_buffer in rig.reducer.layout.flat_buffers)

    for counted, units in run_ranks(2, rank):
        assert counted == units > len(NAMES)
