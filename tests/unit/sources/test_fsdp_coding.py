"""What FSDP2's gathers and scatters send: rows of bytes, one for each shard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.recipes import recipe
from gradwire.sources.fsdp.coding import GATHERS, Coding, Drawn, RoundedBlocks, Short, scattering

CODINGS: tuple[Coding, ...] = (
    Short(),
    RoundedBlocks("int8", 128),
    RoundedBlocks("fp8", 256),
    RoundedBlocks("int4", 128),
    Drawn(4, 128),
)
PARTS = ((1,), (300,), (129, 0, 3), (7, 64, 1000))
SHARDS = (1, 2, 5)


def _rows(coding: Coding, x: Tensor, shards: int, parts: tuple[int, ...], key: int = 7) -> Tensor:
    rows = torch.empty(shards, coding.row_bytes(parts, x.dtype), dtype=torch.uint8)
    coding.encode(x.clone(), rows, parts, key)
    return rows


def _decoded(coding: Coding, rows: Tensor, parts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    out = torch.full((rows.shape[0] * sum(parts),), torch.nan, dtype=dtype)
    coding.decode(rows, out, parts)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_each_shard_is_coded_as_it_would_be_alone(coding: Coding, dtype: torch.dtype) -> None:
    for parts in PARTS:
        for shards in SHARDS:
            x = torch.randn(shards * sum(parts), dtype=dtype)
            rows = _rows(coding, x, shards, parts)
            assert torch.equal(rows, _rows(coding, x, shards, parts)), "the same bytes again"
            whole = _decoded(coding, rows, parts, dtype).view(shards, -1)
            for row, shard in zip(rows, whole, strict=True):
                assert torch.equal(_decoded(coding, row[None], parts, dtype), shard)


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_a_sum_adds_row_after_row(coding: Coding) -> None:
    for parts in PARTS:
        rows = _rows(coding, torch.randn(3 * sum(parts)), 3, parts)
        out, expected = torch.full((sum(parts),), torch.nan), torch.zeros(sum(parts))
        coding.sum(rows, out, parts)
        for row in rows:
            expected += _decoded(coding, row[None], parts, torch.float32)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("coding", [each for each in CODINGS if isinstance(each, RoundedBlocks)], ids=str)
def test_blocks_leave_what_they_do_not_say(coding: RoundedBlocks) -> None:
    x = torch.randn(2 * 300)
    left, rows = x.clone(), torch.empty(2, coding.row_bytes((300,), x.dtype), dtype=torch.uint8)
    coding.encode(left, rows, (300,), 0)
    # The subtraction rounds once where the code is the largest, by half a unit in the last place of about 4.
    assert float((_decoded(coding, rows, (300,), x.dtype) + left - x).abs().max()) <= 2**-22


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_a_scale_never_reaches_into_another_parameter(coding: Coding) -> None:
    small = 1e-3 * torch.ones(10)
    for large in (1e3 * torch.ones(20), torch.full((20,), torch.nan)):
        rows = _rows(coding, torch.cat([large, small]), 1, (20, 10))
        found = _decoded(coding, rows, (20, 10), torch.float32)[20:]
        assert float((found - small).abs().max()) <= 1e-3 / 128
        if not large.isfinite().all():
            assert _decoded(coding, rows, (20, 10), torch.float32)[:20].isnan().all()


def test_draws_are_right_in_the_mean_and_differ_by_key() -> None:
    coding, x = Drawn(4, 64), torch.randn(64)
    found = torch.stack(
        [_decoded(coding, _rows(coding, x, 1, (64,), key), (64,), torch.float32) for key in range(2000)]
    )
    step = float(x.abs().max()) / 7
    # A draw varies by at most half a step, so its mean by 1/90 of that; five of these in 64 elements.
    assert float((found.mean(0) - x).abs().max()) < 5 * step / 2 / 2000**0.5
    assert float((found[0] - found[1]).abs().max()) > 0


def test_recipes_say_what_is_scattered() -> None:
    assert scattering(recipe("dense")).coding is None
    assert scattering(recipe("int8")).coding == RoundedBlocks("int8", 256)
    assert scattering(recipe("int8(feedback=True)")).feedback
    assert scattering(recipe("int4(block=64)")).coding == RoundedBlocks("int4", 64)
    assert scattering(recipe("int4(block=64)")).unremembered == Drawn(4, 64)
    assert scattering(recipe("bf16")).coding == scattering(recipe("bf16(sum='fp32')")).coding == Short()
    for other in ("fp16", "topk", "auto", "bf16(sum='bf16')", "int8(collective='all_gather')"):
        with pytest.raises(ValueError, match="is not for FSDP2's own scatters"):
            scattering(recipe(other))


def test_bytes_per_element_are_those_that_the_page_says() -> None:
    elements = 1 << 16
    gather = GATHERS["int8"]
    assert gather is not None
    assert gather.row_bytes((elements,), torch.float32) / elements == 1 + 4 / 128
    sizes = {"int8": 1 + 4 / 256, "fp8": 1 + 4 / 256, "int4": 0.5 + 4 / 128, "bf16": 2.0}
    for text, expected in sizes.items():
        coding = scattering(recipe(text)).coding
        assert coding is not None
        assert coding.row_bytes((elements,), torch.float32) / elements == expected
