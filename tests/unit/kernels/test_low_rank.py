"""Products with thin factors and orthonormal factors: against dense float64, and against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.kernels.low_rank import left_products, orthonormalise, outer_products, right_products
from tests.support.inputs import FINITE, generator, largest, normal, special
from tests.support.looped import looped

SHAPES = ((1, 1), (1, 7), (7, 1), (37, 61), (61, 37), (16, 64), (129, 515), (300, 8))
GAP = 5  # elements between matrices, which no kernel may touch
U = torch.finfo(torch.float32).eps / 2
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TAME = [kind for kind in FINITE if kind is not largest]


def laid_out(rank: int) -> tuple[Tensor, int, int, int]:
    """All shapes in one unit, with gaps: places, and the sizes of unit, left and right factors."""
    start, left, right, places = GAP, 0, 0, []
    for rows, columns in SHAPES:
        places.append((start, rows, columns, left, right))
        start, left, right = start + rows * columns + GAP, left + rank * rows, right + rank * columns
    return torch.tensor(places), start, left, right


def dense(flat: Tensor, start: int, rows: int, columns: int) -> Tensor:
    return flat[start : start + rows * columns].view(rows, columns).double()


def factor(flat: Tensor, start: int, rank: int, size: int) -> Tensor:
    """(size, rank), as a paper writes it."""
    return flat[start : start + rank * size].view(rank, size).double().t()


def within(found: Tensor, exact: Tensor, terms: Tensor, roundings: int, floor: float) -> None:
    """n roundings relative to the sum of magnitudes, and below the normal range n smallest numbers."""
    excess = (found - exact).abs() - (roundings * U * terms + roundings * floor)
    assert not excess.numel() or excess.max() <= 0.0, excess.max()


def given(kind: Callable[[int], Tensor], numel: int, dtype: torch.dtype) -> Tensor:
    """In float16 what is left must not outgrow the type."""
    return kind(numel).clamp(-1e3, 1e3).to(dtype) if dtype == torch.float16 else kind(numel).to(dtype)


def eps_of(dtype: torch.dtype) -> int:
    """Roundings of float32 that one rounding of the unit's type is worth."""
    return max(1, int(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps))


@looped("rank", [1, 2, 4])
@looped("dtype", DTYPES)
@looped("kind", TAME)
@looped("subtract", [False, True])
def test_left_products(kind: Callable[[int], Tensor], dtype: torch.dtype, rank: int, subtract: bool) -> None:
    places, numel, lefts, rights = laid_out(rank)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    before = given(kind, numel, dtype)
    x, left = before.clone(), torch.full((lefts,), torch.nan, dtype=wide)
    right = normal(rights).to(wide) / 32
    left_products(x, places, rank, left, right, subtract)
    floor = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for start, rows, columns, at_left, at_right in places.tolist():
        m, q = dense(before, start, rows, columns), factor(right, at_right, rank, columns)
        p = factor(left, at_left, rank, rows)
        within(p, m @ q, m.abs() @ q.abs(), columns + 1, floor)
        left_over = m - p @ q.t() if subtract else m
        terms = m.abs() + p.abs() @ q.t().abs()
        within(dense(x, start, rows, columns), left_over, terms, (2 * rank + 1) * eps_of(dtype), floor)
    untouched = torch.ones(numel, dtype=torch.bool)
    for start, rows, columns, _, _ in places.tolist():
        untouched[start : start + rows * columns] = False
    assert torch.equal(x[untouched], before[untouched])


@looped("rank", [1, 2, 4])
@looped("dtype", DTYPES)
@looped("kind", TAME)
def test_right_products_and_what_they_leave(
    kind: Callable[[int], Tensor], dtype: torch.dtype, rank: int
) -> None:
    places, numel, lefts, rights = laid_out(rank)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    before = given(kind, numel, dtype)
    x, right = before.clone(), torch.full((rights,), torch.nan, dtype=wide)
    left = normal(lefts).to(wide) / 32
    right_products(x, places, rank, left, right)
    floor = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for start, rows, columns, at_left, at_right in places.tolist():
        m, p = dense(before, start, rows, columns), factor(left, at_left, rank, rows)
        q = factor(right, at_right, rank, columns)
        within(q, m.t() @ p, m.abs().t() @ p.abs(), rows + 1, floor)
        terms = m.abs() + p.abs() @ q.t().abs()
        within(dense(x, start, rows, columns), m - p @ q.t(), terms, (2 * rank + 1) * eps_of(dtype), floor)


@looped("rank", [1, 2, 4])
def test_outer_products_have_the_bits_of_the_reference(rank: int) -> None:
    places, numel, lefts, rights = laid_out(rank)
    left, right = normal(lefts), normal(rights)
    fast, slow = torch.full((numel,), 9.0), torch.full((numel,), 9.0)
    outer_products(fast, places, rank, left, right)
    outer_products.plain(slow, places, rank, left, right)
    assert torch.equal(fast, slow)
    assert (fast[:GAP] == 9.0).all()


def test_many_matrices_in_one_call_are_as_one_by_one() -> None:
    places, numel, lefts, rights = laid_out(2)
    right = normal(rights)
    together, alone = normal(numel), normal(numel)
    found = [torch.zeros(lefts), torch.zeros(rights), torch.zeros(lefts), torch.zeros(rights)]
    left_products(together, places, 2, found[0], right, subtract=True)
    right_products(together, places, 2, found[0], found[1])
    for place in places:
        left_products(alone, place[None], 2, found[2], right, subtract=True)
        right_products(alone, place[None], 2, found[2], found[3])
    assert torch.equal(together, alone)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_what_is_not_finite_stays_so_and_in_its_matrix() -> None:
    places, numel, lefts, rights = laid_out(1)
    for value in (torch.nan, torch.inf, -torch.inf):
        x, left, right = normal(numel), torch.empty(lefts), torch.empty(rights)
        start, rows, columns, at_left, at_right = places[3].tolist()
        x[start + 100] = value
        left_products(x, places, 1, left, normal(rights))
        bad = ~left.isfinite()
        assert bad.nonzero().tolist() == [[at_left + 100 // columns]]
        orthonormalise(left, places[:, [3, 1]], 1)
        bad = ~left.isfinite()
        assert bad[at_left : at_left + rows].all()
        assert int(bad.sum()) == rows
        right_products(x, places, 1, left, right)
        bad = ~right.isfinite()
        assert bad[at_right : at_right + columns].all()
        assert int(bad.sum()) == columns


def columns_of(kind: Callable[[int], Tensor], size: int, rank: int) -> Tensor:
    """Columns that differ, whatever the kind."""
    return torch.stack([kind(size + k)[:size] for k in range(rank)])


@looped("dtype", [torch.float32, torch.float64])
@looped("kind", FINITE)
@looped(("size", "rank"), [(1, 1), (5, 1), (5, 3), (64, 4), (1000, 8)])
def test_columns_become_orthonormal_and_span_the_same(
    kind: Callable[[int], Tensor], size: int, rank: int, dtype: torch.dtype
) -> None:
    given = columns_of(kind, size, rank).to(dtype)
    fast, slow = given.clone().view(-1), given.clone().view(-1)
    spans = torch.tensor([[0, size]])
    orthonormalise(fast, spans, rank)
    orthonormalise.plain(slow, spans, rank, None)
    # Sums in float64 in another order, then a rounding: two ulps of at most 1, and in float64 what
    # a column grows by that loses all but a millionth of itself.
    eps = torch.finfo(dtype).eps
    assert (fast - slow).abs().max() <= 2 * eps + (1e8 * eps if dtype == torch.float64 else 0)
    found = fast.view(rank, size).double()
    gram, present = found @ found.t(), found.any(1)
    # Each entry is rounded once, relatively: 2u of a norm or product of norms of 1.
    assert (gram - torch.diag(present.double())).abs().max() <= 4 * torch.finfo(torch.float32).eps
    scaled = given.double() / given.double().abs().sum(1, keepdim=True).clamp_min(1e-300)
    beside = scaled - scaled @ found.t() @ found
    # A column that is dropped lies within a millionth of the others.
    assert beside.abs().max() <= 2e-6


@looped("dtype", [torch.float32, torch.float64])
def test_columns_that_are_nearly_the_same_become_orthonormal(dtype: torch.dtype) -> None:
    # A hundred-thousandth is left of each beside the first: one pass of Gram-Schmidt would leave them 1e5
    # roundings of float64 away from orthogonal.
    size, rank = 300, 6
    factors = 1.0 + 1e-5 * torch.randn(rank, size, generator=generator(1), dtype=torch.float64)
    factors = factors.to(dtype).view(-1)
    orthonormalise(factors, torch.tensor([[0, size]]), rank)
    found = factors.view(rank, size).double()
    # 300 products of two numbers with a rounding each, of norm 1.
    assert (found @ found.t() - torch.eye(rank)).abs().max() <= 4 * torch.finfo(dtype).eps


def test_spare_columns_take_the_place_of_what_is_lost() -> None:
    spans = torch.tensor([[0, 4], [12, 3]])
    spare = torch.cat([torch.eye(4)[:3].reshape(-1), torch.eye(3).reshape(-1)])
    factors = torch.zeros(21)
    factors[:4] = torch.tensor([0.0, 3.0, 0.0, 0.0])
    factors[8:12] = torch.tensor([0.0, 1e-3, 0.0, 0.0])  # the first again
    orthonormalise(factors, spans, 3, spare)
    assert factors[:12].view(3, 4).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    assert torch.equal(factors[12:], spare[12:]), "all lost: the spare ones as they are"
    slow = torch.zeros(21)
    slow[:4], slow[8:12] = torch.tensor([0.0, 3.0, 0.0, 0.0]), torch.tensor([0.0, 1e-3, 0.0, 0.0])
    orthonormalise.plain(slow, spans, 3, spare)
    assert torch.equal(slow, factors)


@looped("dtype", [torch.float32, torch.float64])
def test_numbers_near_the_ends_of_the_range(dtype: torch.dtype) -> None:
    for magnitude in (torch.finfo(dtype).max / 8, torch.finfo(dtype).smallest_normal / 8):
        factors = torch.tensor([3.0, 4.0, 0.0], dtype=dtype).div_(8.0) * magnitude
        orthonormalise(factors, torch.tensor([[0, 3]]), 1)
        # 3 and 4 subnormal units of the last place, 2^-20 and less of the number.
        assert factors.tolist() == pytest.approx([0.6, 0.8, 0.0], rel=1e-6)


def test_nan_is_not_lost_in_columns_of_any_kind() -> None:
    for size in (2, 50, 500):
        for rank in (1, 2):
            factors = columns_of(special, size, rank).view(-1).nan_to_num(torch.nan)
            factors[1] = torch.nan
            orthonormalise(factors, torch.tensor([[0, size]]), rank, torch.randn(size * rank))
            assert not factors[:size].isfinite().any()


def test_equal_factors_give_equal_bits_at_any_address() -> None:
    given = torch.randn(4 * 999, generator=generator(4))
    bits = set()
    for shift in range(5):
        room = torch.empty(given.numel() + shift)[shift:]
        room.copy_(given)
        orthonormalise(room, torch.tensor([[0, 999]]), 4)
        bits.add(room.numpy().tobytes())
    assert len(bits) == 1


def test_what_would_be_read_out_of_bounds_is_refused() -> None:
    x, thin = torch.zeros(6), torch.zeros(3)
    for places in ([[1, 2, 3, 0, 0]], [[0, 2, 3, 2, 0]], [[0, 2, 3, 0, 1]], [[-1, 2, 3, 0, 0]]):
        with pytest.raises(ValueError, match="do not fit"):
            left_products(x, torch.tensor(places), 1, thin, thin)
        with pytest.raises(ValueError, match="do not fit"):
            right_products(x, torch.tensor(places), 1, thin, thin)
        with pytest.raises(ValueError, match="do not fit"):
            outer_products(x, torch.tensor(places), 1, thin, thin)
    with pytest.raises(ValueError, match="exceed"):
        orthonormalise(x, torch.tensor([[0, 4]]), 2)
    with pytest.raises(ValueError, match="no matrices"):
        left_products(x, torch.tensor([[0.0, 2, 3, 0, 0]]), 1, thin, thin)
    with pytest.raises(ValueError, match="spare"):
        orthonormalise(x, torch.tensor([[0, 3]]), 2, thin)


def test_products_keep_all_bits_whatever_the_script_allows_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 would lose what error feedback takes for sent. On the CPU only the setting itself can be seen."""
    products, seen = torch.backends.cuda.matmul, []

    class Looking(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul):
                seen.append(products.fp32_precision)
            return super().__torch_function__(func, types, args, kwargs or {})

    x, factors = torch.arange(6.0).as_subclass(Looking), torch.ones(5).as_subclass(Looking)
    places = torch.tensor([[0, 2, 3, 0, 0]])
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        left_products.plain(x, places, 1, factors[:2], factors[2:], subtract=True)
        right_products.plain(x, places, 1, factors[:2], factors[2:])
        after = [products.fp32_precision]
        with pytest.raises(RuntimeError):
            left_products.plain(x, places, 1, factors[:2], factors[2:4], subtract=True)  # one is lacking
        after.append(products.fp32_precision)
    finally:
        products.fp32_precision = before
    assert seen[:4] == ["ieee"] * 4
    assert after == ["tf32", "tf32"]
