"""Two bits per element: by hand, against a loop over blocks in numpy, and at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.kernels.layouts import Blocks, scale_type
from gradwire.kernels.levels import add_levels, encode_levels
from tests.support.inputs import FINITE, constant, half_zeros, normal
from tests.support.looped import looped

SIZES = ([1], [2], [7], [64], [0, 63, 65, 0, 130], [4097], [1000, 3, 3])


def encoded(x: Tensor, sizes: list[int], block: int | None = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Levels and codes, over what must not stay, and what is left."""
    blocks, left = Blocks(tuple(sizes), block), x.clone()
    levels = torch.full((blocks.count, 2), torch.nan, dtype=scale_type(x.dtype))
    codes = torch.full((sum(-(-size // 4) for size in sizes),), 0xA5).byte()
    encode_levels(left, blocks, levels, codes, leave=True)
    return levels, codes, left


def decoded(levels: Tensor, codes: Tensor, sizes: list[int], block: int | None = 64) -> Tensor:
    out = torch.zeros(sum(sizes), dtype=levels.dtype)
    add_levels(levels, codes, Blocks(tuple(sizes), block), out)
    return out


def expected(x: Tensor, sizes: list[int], block: int) -> np.ndarray:
    """What every element should become, in float64."""
    found = []
    for part in x.split(sizes):
        for start in range(0, part.numel(), block):
            each = part[start : start + block].double().numpy()
            magnitudes = np.abs(each)
            high = magnitudes > (magnitudes.min() + magnitudes.max()) / 2
            means = [magnitudes[side].mean() if side.any() else 0.0 for side in (~high, high)]
            means[0] *= magnitudes.all()
            found.append(np.where(each < 0, -1.0, 1.0) * np.where(high, means[1], means[0]))
    return np.concatenate(found)


@looped("draw", [normal, half_zeros, constant])
@looped("sizes", SIZES)
def test_elements_become_the_mean_of_their_half_with_their_sign(draw, sizes: list[int]) -> None:
    x = draw(sum(sizes))
    levels, codes, left = encoded(x, sizes)
    out = decoded(levels, codes, sizes)
    # One rounding to float32.
    np.testing.assert_allclose(out.numpy(), expected(x, sizes, 64), rtol=2.0**-24, atol=0)
    assert torch.equal(left, x - out)


def test_by_hand() -> None:
    x = torch.tensor([1.0, -2.0, 5.0, -9.0, 6.0, 4.0, 0.0, -1.0])
    levels, codes, left = encoded(x, [5, 3])
    # 1 … 9 has its middle at 5, which is low; 0 … 4 at 2, and as there is a 0, the low 1 waits.
    assert levels.tolist() == [[pytest.approx(8 / 3), 7.5], [0.0, 4.0]]
    assert codes.tolist() == [0b11_00_01_00, 0b10, 0b01_00_10]
    assert left[3:].tolist() == [-1.5, -1.5, 0.0, 0.0, -1.0]


@looped("draw", FINITE)
def test_no_level_is_above_the_largest_of_its_block_and_what_is_0_stays_0(draw) -> None:
    x = draw(2048)
    levels, codes, left = encoded(x, [2048])
    assert (levels.amax(1) <= x.abs().view(-1, 64).amax(1)).all()
    assert not decoded(levels, codes, [2048])[x == 0].any()
    assert not left[x == 0].any()


def test_what_is_not_finite_poisons_its_block_alone() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.cat([torch.zeros(64), torch.ones(64), torch.ones(64)])
        x[70] = bad
        levels, codes, left = encoded(x, [192])
        out = decoded(levels, codes, [192])
        assert not out[:64].any()
        assert out[64:128].isnan().all()
        assert left[64:128].isnan().all()
        assert torch.equal(out[128:], torch.ones(64))


def test_a_parameter_does_not_depend_on_its_neighbours() -> None:
    x = torch.cat([normal(100), 1e6 * half_zeros(77), constant(300)])
    whole = encoded(x, [100, 77, 300])
    alone = [encoded(part, [part.numel()]) for part in x.split([100, 77, 300])]
    for found, pieces in zip(whole, zip(*alone, strict=True), strict=True):
        assert torch.equal(found, torch.cat(pieces))


@looped("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_subtract_what_they_decode_to(dtype: torch.dtype) -> None:
    x = normal(1000).to(dtype)
    levels, codes, left = encoded(x, [1000])
    out = torch.zeros_like(x)
    add_levels(levels, codes, Blocks((1000,), 64), out)
    assert torch.equal(left, x - out)
    assert left.double().norm() < 0.5 * x.double().norm()


def test_the_ends_of_the_range_overflow_nowhere() -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        x = torch.full((128,), torch.finfo(dtype).max, dtype=dtype)
        x[::3] *= -0.75
        _levels, _codes, left = encoded(x, [128])
        assert left.isfinite().all()
        assert (left.abs() <= x.abs() / 3).all()


def test_sizes_that_do_not_fit_raise() -> None:
    levels, codes = torch.zeros(2, 2), torch.zeros(25).byte()
    with pytest.raises(ValueError, match="elements, levels and bytes"):
        encode_levels(torch.zeros(100), Blocks((100,), 56), levels, codes[:-1])
    with pytest.raises(ValueError, match="elements, levels and bytes"):
        add_levels(levels[:1], codes, Blocks((100,), 56), torch.zeros(100))
