"""Count sketches: kernels against the reference, and hashes against chance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.kernels.sketches import count_sketch, count_sketch_buckets, count_sketch_estimates
from tests.support.looped import looped

SIZES = (0, 1, 2, 2047, 2048, 2049, 40_009)
INF, NAN = float("inf"), float("nan")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hashes(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (rows, 2), generator=generator(seed))


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=generator(n))


def zeros(n: int) -> Tensor:
    return torch.zeros(n)


def ties(n: int) -> Tensor:
    return torch.randint(-1, 2, (n,), generator=generator(n)).float()


def half_zeros(n: int) -> Tensor:
    return normal(n) * (torch.rand(n, generator=generator(n)) < 0.5)


def outlier(n: int) -> Tensor:
    x = normal(n)
    x[n // 2 : n // 2 + 1] = 1e30
    return x


def heavy_tail(n: int) -> Tensor:
    return normal(n) / torch.rand(n, generator=generator(n + 1)).clamp_min(1e-6) ** 2


def subnormal(n: int) -> Tensor:
    return normal(n) * 1e-40


def constant(n: int) -> Tensor:
    return torch.full((n,), 0.1)


def special(n: int) -> Tensor:
    x = normal(n)
    for place, value in enumerate((NAN, INF, -INF)):
        x[n // 3 + place : n // 3 + place + 1] = value
    return x


KINDS = (normal, zeros, ties, half_zeros, outlier, heavy_tail, subnormal, constant, special)
every_kind = looped("kind", KINDS)


@every_kind
@looped("n", SIZES)
@looped(("rows", "columns"), [(1, 1), (3, 7), (5, 1000)])
def test_same_table_as_the_reference(kind: Callable[[int], Tensor], n: int, rows: int, columns: int) -> None:
    x, drawn = kind(n), hashes(rows, n)
    table, exact = count_sketch(x, drawn, columns), count_sketch.plain(x.double(), drawn, columns)
    column, _ = count_sketch_buckets(n, drawn, columns)
    magnitude = torch.zeros_like(exact).scatter_add_(1, column, x.abs().double().expand(rows, n))
    # At most n additions, each off by at most u = eps/2 of a partial sum no larger than Σ|x|.
    off = (table.double() - exact).abs()
    finite = exact.isfinite()
    assert (off[finite] <= n * torch.finfo(torch.float32).eps / 2 * magnitude[finite]).all()
    assert torch.equal(table.double()[~finite].isnan(), exact[~finite].isnan())
    assert torch.equal(table.isfinite(), finite)


@every_kind
@looped("n", SIZES)
@looped(("rows", "columns"), [(1, 1), (3, 7), (5, 1000), (7, 2)])
def test_same_estimates_as_the_reference(
    kind: Callable[[int], Tensor], n: int, rows: int, columns: int
) -> None:
    table, drawn = kind(rows * columns).view(rows, columns), hashes(rows, n)
    out = torch.full((n,), NAN)
    assert count_sketch_estimates(table, drawn, out) is out
    # Medians of an odd number are no sums: they agree to the last bit.
    told = table.nan_to_num(INF, INF, -INF)
    assert torch.equal(out, count_sketch_estimates.plain(told, drawn, torch.empty_like(out)))


@looped("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_take_the_reference_path(dtype: torch.dtype) -> None:
    x, drawn = ties(3000).to(dtype), hashes(3)
    table = count_sketch(x, drawn, 500)
    assert table.dtype == dtype
    assert torch.equal(table, count_sketch(x.float(), drawn, 500).to(dtype))
    estimates = count_sketch_estimates(table, drawn, torch.empty_like(x))
    assert torch.equal(estimates.float(), count_sketch_estimates(table.float(), drawn, torch.empty(3000)))


def test_by_hand() -> None:
    # Multipliers and addends that spell out the hash: its upper 32 bits are 2·c·2^31/columns + sign.
    quarter, minus = 1 << 62, 1 << 32
    drawn = torch.tensor([[quarter, 0], [0, minus], [0, quarter]])
    table = count_sketch(torch.tensor([1.0, 10.0, 100.0, 1000.0, 10_000.0]), drawn, 4)
    assert table.tolist() == [[10_001.0, 10.0, 100.0, 1000.0], [-11_111.0, 0, 0, 0], [0, 11_111.0, 0, 0]]
    estimates = count_sketch_estimates(table, drawn, torch.empty(5))
    assert estimates.tolist() == [11_111.0] * 5
    first_row = count_sketch_estimates(table[:1], drawn[:1], torch.empty(5))
    assert first_row.tolist() == [10_001.0, 10.0, 100.0, 1000.0, 10_001.0]
    second_row = count_sketch_estimates(table[1:2], drawn[1:2], torch.empty(5))
    assert second_row.tolist() == [11_111.0] * 5


def test_sketches_add_up() -> None:
    one, other, drawn = ties(5000), torch.arange(5000.0) % 7, hashes(5)
    both = count_sketch(one, drawn, 100) + count_sketch(other, drawn, 100)
    assert torch.equal(both, count_sketch(one + other, drawn, 100))


@pytest.mark.rest
@looped(("i", "j"), [(0, 1), (5, 6), (0, 4096), (17, 9000)])
def test_two_elements_meet_as_often_as_chance_has_it_and_with_either_sign(i: int, j: int) -> None:
    # Probability 1/8 over D draws: standard deviation √(D·p·(1-p)). Seeds are fixed.
    draws, p = 4000, 1 / 8
    column, sign = (part[:, [i, j]] for part in count_sketch_buckets(j + 1, hashes(draws), 8))
    meet = column[:, 0] == column[:, 1]
    assert abs(int(meet.sum()) - draws * p) <= 4 * (draws * p * (1 - p)) ** 0.5
    assert abs(int(sign.prod(1)[meet].sum())) <= 4 * int(meet.sum()) ** 0.5


def test_rows_without_a_middle_one_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows have no middle one"):
        count_sketch_estimates(torch.zeros(2, 4), hashes(2), torch.empty(8))


def test_inputs_are_only_read() -> None:
    x, drawn = special(3000), hashes(3)
    before = x.clone()
    table = count_sketch(x, drawn, 50)
    kept = table.clone()
    count_sketch_estimates(table, drawn, torch.empty(3000))
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    assert torch.equal(table.isnan(), kept.isnan())
