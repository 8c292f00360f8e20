"""How parameters are cut between the ranks of a node."""

from __future__ import annotations

import pytest
import torch

from gradwire.comm import Comm, run_ranks
from gradwire.recipes import recipe
from gradwire.step.layout import build
from gradwire.step.shards import Shard, cut, joined, shards_of
from gradwire.unit.context import Replicated
from gradwire.unit.parameters import ParameterSpec
from tests.support.looped import looped
from tests.support.rig import specs


def _spec(*shape: int, stride: tuple[int, ...] | None = None) -> ParameterSpec:
    return ParameterSpec("w", shape, torch.float32, torch.Size(shape).numel(), stride)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_shards_make_up_the_parameter(parts: int) -> None:
    for shard in shards_of(specs(), parts):
        whole = torch.arange(1.0, 1.0 + shard.whole.numel)
        pieces = [cut(shard, number, whole) for number in range(parts)]
        assert all(piece.shape == (shard.numel,) for piece in pieces)
        assert torch.equal(joined(shard, pieces), whole)
        assert torch.cat(pieces)[whole.numel() :].eq(0).all()
        assert shard.numel == torch.Size(shard.shape).numel()


def test_cuts_fall_between_rows_where_that_adds_little() -> None:
    channels_last, transposed = (18, 1, 6, 2), (1, 64)
    shards = {
        (): _spec(),
        (3,): _spec(5),
        (32, 10): _spec(64, 10),
        (22, 10): _spec(43, 10),  # one row in 43
        (115,): _spec(23, 10),  # one in 23 would be too many
        (32, 2, 3, 3): _spec(64, 2, 3, 3, stride=channels_last),
        (320,): _spec(64, 10, stride=transposed),  # rows are no pieces of memory
        (0,): _spec(0, 4),
    }
    for shape, spec in shards.items():
        [shard] = shards_of([spec], 2)
        assert shard.shape == (shape or (1,))
        assert shard.whole is spec


def test_a_shard_of_rows_is_those_rows_whatever_the_order_in_memory() -> None:
    weight = torch.randn(64, 2, 3, 3).to(memory_format=torch.channels_last)
    spec = _spec(64, 2, 3, 3, stride=weight.stride())
    [shard] = shards_of([spec], 2)
    assert torch.equal(shard.shaped(cut(shard, 1, spec.flat(weight))), weight[32:])


@pytest.mark.parametrize("parts", [2, 3])
def test_policies_go_by_the_whole_parameter(parts: int) -> None:
    cpu, compressed = torch.device("cpu"), recipe("topk(ratio=0.1)").build()
    whole, shards = (build(shards_of(specs(), each), compressed, None, cpu, 2) for each in (1, parts))
    assert whole.slots.keys() == shards.slots.keys()
    assert whole.slots


def test_what_replicas_hold_alike_is_cut_as_gradients_are() -> None:
    weight = torch.randn(7, 3)
    seen = Replicated(
        weight, {"lr": 0.1}, {"exp_avg": 2 * weight, "step": torch.tensor(5.0)}, torch.optim.Adam
    )

    def rank(comm: Comm) -> Replicated | None:
        return Shard(comm).replicas(lambda name: seen if name == "w" else None, [_spec(7, 3)])("w")

    found = [each for each in run_ranks(2, rank) if each is not None]
    rows = torch.stack([each.parameter.view(-1) for each in found]).view(-1)
    assert torch.equal(rows[:21], weight.view(-1))
    assert rows[21:].eq(0).all()
    for each in found:
        assert torch.equal(each.state["exp_avg"], 2 * each.parameter)
        assert each.state["step"] is seen.state["step"]
        assert each.group is seen.group


@looped("rows", [1, 2, 3, 5, 8, 10, 65])
@looped("parts", [1, 2, 3, 4, 7])
@looped("row", [(), (3,), (2, 3)])
def test_shards_by_rows_are_fsdps(rows: int, parts: int, row: tuple[int, ...]) -> None:
    values = torch.arange(float(rows * torch.Size(row).numel())).view(rows, *row)
    whole = ParameterSpec("w", tuple(values.shape), torch.float32, values.numel())
    [shard] = shards_of([whole], parts, by_rows=True)
    # FSDP2 shards by torch.chunk, which makes fewer chunks where there are too few rows.
    chunks = values.chunk(parts)
    found = [cut(shard, number, values.view(-1)) for number in range(parts)]
    for number, mine in enumerate(found):
        theirs = chunks[number] if number < len(chunks) else values[:0]
        assert shard.shape == (chunks[0].shape[0], *row)
        assert torch.equal(shard.shaped(mine)[: theirs.shape[0]], theirs)
        assert not shard.shaped(mine)[theirs.shape[0] :].any()
    assert torch.equal(joined(shard, found), values.view(-1))
