"""Shards by rows are those that FSDP cuts, filled up to one size."""

from __future__ import annotations

import pytest
import torch

from gradwire.arena import ParameterSpec
from gradwire.engine.shards import cut, joined, shards_of


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 10, 65])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("row", [(), (3,), (2, 3)])
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
