"""Which ranks share a node, as all of them agree; and how buffers are packed for them."""

from __future__ import annotations

import pytest
import torch

from gradwire.comm import Comm, run_ranks
from gradwire.sources.nodes.level import Packing
from gradwire.sources.nodes.members import Members, NodeTable, agreed, neighbours
from gradwire.step.shards import shards_of
from gradwire.unit.parameters import slots_of
from tests.support.rig import specs


def _agreed(kind: str, said: list[Members]) -> tuple[NodeTable | None, str]:
    first, *others = run_ranks(len(said), lambda comm: agreed(kind, said[comm.rank], comm))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    "said",
    [
        [(0, 1), (0, 1), (2, 3), (2, 3)],
        [(0, 2), (1, 3), (0, 2), (1, 3)],
        [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3,
    ],
)
def test_nodes_of_one_size_are_a_table(said: list[Members]) -> None:
    table, why_flat = _agreed("given", said)
    assert table is not None
    assert not why_flat
    for rank, members in enumerate(said):
        assert table.inside(rank) == members
        between = table.between(rank)
        assert rank in between
        assert len(between) == len(said) // table.per_node
        assert [said[each].index(each) for each in between] == [members.index(rank)] * len(between)


@pytest.mark.parametrize("said", [[(0,), (1,), (2,)], [(0, 1, 2)] * 3])
def test_one_node_or_one_rank_on_each_is_a_flat_world(said: list[Members]) -> None:
    assert _agreed("given", said) == (None, "")
    assert _agreed("auto", said) == (None, "")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([(0, 1), (0, 1), (2,)], "differ in size, from 1 to 2"),
        ([(0, 1), (1, 2), (2, 0)], "say otherwise"),
        ([(1,), (0,)], "say otherwise"),
    ],
)
def test_what_is_no_table_is_refused_when_given_and_flat_when_found(said: list[Members], told: str) -> None:
    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match=told):
            agreed("given", said[comm.rank], comm)

    run_ranks(len(said), rank)
    table, why_flat = _agreed("auto", said)
    assert table is None
    assert told in why_flat


def test_neighbours_are_numbered_within_the_group() -> None:
    assert neighbours([[4, 5], [6, 7]], (7, 6, 5, 4), 0) == (0, 1)
    assert neighbours(None, (4, 5), 1) == (1,)
    with pytest.raises(ValueError, match="the model's ranks are"):
        neighbours([[4, 5, 6]], (4, 5), 0)
    with pytest.raises(ValueError, match="2 times"):
        neighbours([[4, 5], [5, 6]], (4, 5, 6), 1)


@pytest.mark.parametrize(("text", "members"), [("2", (2, 3)), ("1", (3,)), ("0", (3,)), ("", (3,))])
def test_auto_reads_what_the_launcher_says(
    monkeypatch: pytest.MonkeyPatch, text: str, members: Members
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert neighbours("auto", range(4), 3) == members


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_buffer_is_packed_in_rows_of_shards_and_back(parts: int) -> None:
    shards, entries = shards_of(specs(), parts), slots_of(specs())
    packing, buffer = Packing(entries, shards, parts), torch.arange(1.0, 1.0 + entries[-1].stop)
    rows = packing.pack(buffer)
    assert rows.shape == (parts, sum(shard.numel for shard in shards))
    assert rows[rows != 0].sort().values.equal(buffer)
    for shard, entry in zip(shards, packing.entries, strict=True):
        own = rows[:, entry.start : entry.stop].reshape(-1)[: shard.whole.numel]
        assert own.diff().eq(1).all()
    back = torch.zeros_like(buffer)
    packing.unpack(rows, back)
    assert torch.equal(back, buffer)
