"""All-reduce in few bits: shards, the second stage, and error feedback over many steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.codec.base import Codec
from gradwire.codec.blocks import blocks
from gradwire.comm import ThreadComm, owe_zeros, run_ranks
from gradwire.contrib.truncate import upper_bits
from gradwire.exchange.base import run
from gradwire.exchange.scatter_reduce import parts_within, scatter_reduce, shards_of
from gradwire.laws import Laws
from gradwire.measure.metered import MeteredComm
from gradwire.unit.context import ExchangeContext, Part
from tests.support.gradients import generator
from tests.support.looped import looped
from tests.support.steps import step
from tests.support.whole import Raw, parts_of

AT = ExchangeContext(step=0, unit=0, rank=0, world=3)


@looped("world", [1, 2, 3, 7])
@looped("sizes", [(), (0,), (1,), (2, 3), (10, 0, 1, 5), (100, 1000)])
def test_shards_are_the_segment_cut_into_even_pieces_with_its_parts(
    world: int, sizes: tuple[int, ...]
) -> None:
    numel, parts = sum(sizes), parts_of(*sizes)
    ctx = ExchangeContext(0, 0, 0, world, parts=parts, unsent=torch.arange(5 + numel))
    shards = [*shards_of(2, 5, 5 + numel, parts, world)]
    assert [shard.start for shard in shards[1:]] == [shard.stop for shard in shards[:-1]]
    assert (shards[0].start, shards[-1].stop) == (0, numel)
    lengths = [shard.stop - shard.start for shard in shards]
    assert max(lengths) - min(lengths) <= 1
    covered = [(part.name, i) for s in shards for part in s.parts for i in range(part.start, part.stop)]
    assert covered == [(part.name, i) for part in parts for i in range(part.numel)]
    for shard in shards:
        assert sum(shard.sizes) == shard.stop - shard.start
        unsent = shard.first(ctx).unsent
        assert unsent is not None
        assert torch.equal(unsent, torch.arange(5 + shard.start, 5 + shard.stop))
        assert shard.second(ctx).unsent is None


def test_a_part_that_is_itself_a_piece_of_a_parameter_is_cut_where_it_lies() -> None:
    parts = (Part("w", (10, 10), 40, 60), Part("v", (5,), 0, 5))
    assert parts_within(parts, 15, 22) == (Part("w", (10, 10), 55, 60), Part("v", (5,), 0, 2))


def test_no_two_codes_draw_from_the_same_generator() -> None:
    units = [replace(AT, unit=unit) for unit in range(3)]
    shards = [shard for segment in range(2) for shard in shards_of(segment, 0, 9, (), 3)]
    contexts = [at for unit in units for shard in shards for at in (shard.first(unit), shard.second(unit))]
    assert len({context.unit for context in contexts}) == len(contexts) == 36


def test_mean_and_rest_by_hand() -> None:
    # int8: rank 0 brings a maximum of 127 or 254, so scales are 1 and 2 and codes whole numbers.
    inputs = [torch.tensor([127.0, 0.4, 254.0, 1.5]), torch.tensor([127.0, 2.0, 254.0, 4.0])]
    first, second = step(scatter_reduce(blocks("int8")), inputs.__getitem__, 2)
    # Owned by rank 0: 127 and (0 + 2) / 2. By rank 1: 254 and (2 + 4) / 2 = 3, whose code is 1.5, a tie.
    assert first.mean.tolist() == second.mean.tolist() == [127.0, 1.0, 254.0, 4.0]
    assert first.unsent.tolist() == pytest.approx([0.0, 0.4, 0.0, -0.5])
    assert second.unsent.tolist() == [0.0, 0.0, 0.0, 2 * (3.0 - 4.0)]
    dropped = step(scatter_reduce(blocks("int8"), second_stage=False), inputs.__getitem__, 2)
    assert dropped[1].mean.tolist() == second.mean.tolist()
    assert dropped[1].unsent.tolist() == [0.0, 0.0, 0.0, 0.0]


@looped("world", [1, 2, 3, 7, 64, 1000])
@looped("sizes", [(), (0,), (1,), (10, 0, 1, 5), (7, 300, 1, 4000, 0), (5000, 5000)])
@looped("codec", [Raw(), blocks("int4", 64), blocks("int8"), upper_bits(7)])
def test_the_longest_shard_is_found_without_looking_at_all(
    codec: Codec, sizes: tuple[int, ...], world: int
) -> None:
    numel, ctx = sum(sizes), ExchangeContext(3, 5, 0, world, parts=parts_of(*sizes))
    shards = shards_of(0, 0, numel, ctx.parts, world)
    payloads = [codec.payload(s.stop - s.start, torch.float32, s.first(ctx)) for s in shards]
    found = scatter_reduce(codec).longest(numel, torch.float32, ctx)
    assert found == max(payloads, key=lambda payload: payload[0])


def test_a_parameter_that_is_zero_everywhere_stays_zero_beside_others() -> None:
    def body(comm: ThreadComm) -> Tensor:
        x = torch.randn(90, generator=generator("beside", comm.rank))
        x[20:60] = 0.0
        mean, ctx = torch.empty(90), ExchangeContext(0, 0, comm.rank, comm.world, parts=parts_of(20, 40, 30))
        run(scatter_reduce(blocks("int4", 64)), x, mean, comm, ctx)
        assert not x[20:60].any()
        return mean

    for mean in run_ranks(3, body):
        assert not mean[20:60].any()
        assert (mean[:20] != 0).any()


def test_segments_change_the_order_of_travel_and_no_bound() -> None:
    exchange, ctx = scatter_reduce(Raw(), segment=400), ExchangeContext(0, 0, 0, 2)
    sizes = [(round_.verb, round_.numel) for round_ in exchange.rounds(1000, torch.float32, ctx)]
    assert sizes == [("all_to_all", 334)] * 3 + [("all_gather", 167)] * 3
    for held in step(exchange, lambda rank: torch.arange(1000.0) + rank, 2):
        assert held.mean.tolist() == [index + 0.5 for index in range(1000)]


def test_whoever_fails_in_a_later_segment_still_pays_what_the_others_expect() -> None:
    class Failing(Raw):
        def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
            if ctx.rank == 1 and ctx.unit // 2 // ctx.world % 4096 == 1:
                raise ZeroDivisionError("second segment")
            return super().take(x, ctx)

    exchange = scatter_reduce(Failing(), segment=4)

    def body(comm: ThreadComm) -> str:
        metered, ctx = MeteredComm(comm), ExchangeContext(0, 0, comm.rank, 2)
        x = torch.ones(12)
        try:
            run(exchange, x, torch.zeros(12), metered, ctx)
        except ZeroDivisionError:
            left = exchange.rounds(12, torch.float32, ctx)[len(metered.rounds) :]
            owe_zeros(metered, left, torch.device("cpu"))
            return "paid"
        return "done"

    assert run_ranks(2, body) == ["done", "paid"]


@dataclass(frozen=True)
class Padded(Raw):
    """As many zeros behind the elements as there have been steps; `phase` may say in which step it is."""

    laws = Laws(lossless=True, contractive=True)

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        return numel + abs(2 - ctx.step), dtype

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        payload = torch.zeros(self.payload(x.numel(), x.dtype, ctx)[0], dtype=x.dtype)
        payload[: x.numel()] = super().take(x, ctx)
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        out.add_(payload[: out.numel()], alpha=weight)


class Phased(Padded):
    def phase(self, ctx: ExchangeContext) -> int:
        return ctx.step


@looped("codec", [Padded(), Phased()])
def test_a_codec_whose_payloads_change_from_step_to_step_sends_what_was_announced(codec: Codec) -> None:
    exchange = scatter_reduce(codec, segment=4)

    def body(comm: ThreadComm) -> None:
        constants: dict[Hashable, Any] = {}
        for number in range(5):
            metered = MeteredComm(comm)
            ctx = ExchangeContext(number, 0, comm.rank, comm.world).with_constants(constants)
            x, mean = torch.full((10,), comm.rank + number + 0.0), torch.empty(10)
            run(exchange, x, mean, metered, ctx)
            assert tuple(metered.rounds) == exchange.rounds(10, torch.float32, ctx)
            assert mean.tolist() == [number + 0.5] * 10

    run_ranks(2, body)
