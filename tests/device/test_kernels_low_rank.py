"""Thin factors: kernels for devices against those of the CPU; products of a rank's own within rounding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from tests.device.bits import same
from tests.support.inputs import KINDS, generator, normal
from tests.support.looped import looped
from tests.support.twins import cpu

pytest.importorskip("triton", reason="kernels for devices need Triton")

from tests.device.there import device

# Rows and columns of less than a program, of one, and of several; full tiles of elements, and others.
SHAPES = ((1, 7), (7, 1), (5, 600), (50, 9), (64, 64), (130, 67))
GAP = 4  # elements between matrices, which no kernel may touch
U = torch.finfo(torch.float32).eps / 2


def laid_out(rank: int, shapes: tuple[tuple[int, int], ...] = SHAPES, first: int = GAP) -> tuple[Tensor, ...]:
    """Places of matrices with gaps between them, and noise for the unit, left factors and right factors."""
    start, left, right, places = first, 0, 0, []
    for rows, columns in shapes:
        places.append((start, rows, columns, left, right))
        start, left, right = start + rows * columns + GAP, left + rank * rows, right + rank * columns
    return torch.tensor(places), normal(start), normal(left + 1), normal(right + 2)[1:-1]


def parts(place: list[int], rank: int, *flat: Tensor) -> list[Tensor]:
    """Matrix, left factor (rows, rank) and right factor (columns, rank) at a row of `places`, in float64."""
    start, rows, columns, at_left, at_right = place
    shapes = ((start, rows, columns), (at_left, rank, rows), (at_right, rank, columns))
    matrix, left, right = (
        each[begin : begin + high * wide].view(high, wide).double()
        for each, (begin, high, wide) in zip(flat, shapes, strict=True)
    )
    return [matrix, left.t(), right.t()]


def close(found: Tensor, exact: Tensor, terms: Tensor, roundings: int) -> None:
    assert ((found - exact).abs() <= roundings * U * terms).all()


def less(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> Tensor:
    """x less left·rightᵀ, in the CPU's order: column by column of the factors."""
    rest = x.clone()
    for start, rows, columns, at_left, at_right in places.tolist():
        matrix = rest[start : start + rows * columns].view(rows, columns)
        for k in range(rank):
            column = left[at_left + k * rows : at_left + (k + 1) * rows]
            matrix -= column[:, None] * right[at_right + k * columns : at_right + (k + 1) * columns]
    return rest


@pytest.mark.rest
@looped("rank", [1, 3])
@looped("subtract", [False, True])
def test_left_products_are_within_rounding_and_leave_the_rest(rank: int, subtract: bool) -> None:
    for first in (GAP, GAP + 1):
        places, x, left, right = laid_out(rank, first=first)
        left.fill_(9.0)
        rest = x.clone()
        assert device.left_products(rest, places, rank, left, right, subtract) is None
        assert left[-1] == 9.0
        for place in places.tolist():
            m, p, q = parts(place, rank, x, left, right)
            close(p, m @ q, m.abs() @ q.abs(), m.shape[1] + 1)
        assert same(rest, less(x, places, rank, left, right) if subtract else x)


@looped(("rank", "shapes"), [(1, SHAPES), (3, SHAPES), (2, ((4200, 2), (3, 5)))], few=1)
def test_right_products_are_within_rounding_and_leave_the_rest(
    rank: int, shapes: tuple[tuple[int, int], ...]
) -> None:
    for first in (GAP, GAP + 1):
        places, x, left, right = laid_out(rank, shapes, first)
        right.fill_(9.0)
        rest = x.clone()
        assert device.right_products(rest, places, rank, left, right) is None
        for place in places.tolist():
            m, p, q = parts(place, rank, x, left, right)
            close(q, m.t() @ p, m.abs().t() @ p.abs(), m.shape[0] + 1)
        assert same(rest, less(x, places, rank, left, right))


@looped("rank", [1, 2, 4])
def test_outer_products_have_the_bits_of_the_cpu(rank: int) -> None:
    for first in (GAP, GAP + 1):
        places, x, left, right = laid_out(rank, first=first)
        found, expected = x.clone(), x.clone()
        assert device.outer_products(found, places, rank, left, right) is None
        cpu.outer_products(expected, places, rank, left, right)
        assert same(found, expected)


@pytest.mark.rest
def test_many_matrices_in_one_call_are_as_one_by_one() -> None:
    places, x, left, right = laid_out(2)
    together = [x.clone(), left.clone(), right.clone()]
    alone = [x.clone(), left.clone(), right.clone()]
    device.left_products(together[0], places, 2, *together[1:], subtract=True)
    device.right_products(together[0], places, 2, *together[1:])
    for place in places:
        device.left_products(alone[0], place[None], 2, *alone[1:], subtract=True)
        device.right_products(alone[0], place[None], 2, *alone[1:])
    assert all(map(same, together, alone))


def test_what_is_not_finite_stays_in_its_matrix() -> None:
    places, x, left, right = laid_out(1)
    x[places[2, 0] + 601] = torch.nan
    device.left_products(x, places, 1, left, right)
    assert left.isnan().nonzero().tolist() == [[int(places[2, 3]) + 1]]
    device.right_products(x, places, 1, left, right)
    bad = right.isnan()
    assert int(bad.sum()) == 600
    assert bad[places[2, 4] : places[2, 4] + 600].all()


SIZES = (1, 5, 8, 43)


def spans_of(rank: int) -> Tensor:
    """Of factors of `SIZES`, with an element between them."""
    starts = accumulate((rank * size + 1 for size in SIZES), initial=1)
    return torch.tensor(list(zip(starts, SIZES, strict=False)))


@pytest.mark.rest
@looped("rank", [1, 2, 3])
@looped("draw", KINDS)
def test_orthonormal_columns_have_the_bits_of_the_cpu(draw: Callable[[int], Tensor], rank: int) -> None:
    spans = spans_of(rank)
    factors = draw(int((spans[-1, 0] + rank * spans[-1, 1]) + 1))
    spare = torch.randn(factors.numel(), generator=generator(3))
    for other in (None, spare):
        found, expected = factors.clone(), factors.clone()
        assert device.orthonormalise(found, spans, rank, other) is None
        cpu.orthonormalise(expected, spans, rank, other)
        assert same(found, expected)


def test_lost_columns_are_replaced_as_on_the_cpu() -> None:
    spans = torch.tensor([[0, 4], [12, 3], [21, 40]])
    spare = torch.randn(141, generator=generator(5))
    spare[:12] = torch.eye(4)[:3].reshape(-1)
    factors = torch.zeros(141)
    factors[1], factors[9] = 3.0, 1e-3  # the third is the first again, and all of the next matrix is lost
    factors[21:61] = normal(40)
    factors[61:101] = factors[21:61] * (1 + 1e-7 * normal(40))
    factors[101:] = spare[21:61] + 1e-5 * normal(40)
    for other in (None, spare):
        found, expected = factors.clone(), factors.clone()
        device.orthonormalise(found, spans, 3, other)
        cpu.orthonormalise(expected, spans, 3, other)
        assert same(found, expected)
        assert bool(found[61:101].any()) is (other is not None)


def test_types_without_a_kernel_are_left_to_the_contract() -> None:
    places, x, left, right = (each.double() if i else each for i, each in enumerate(laid_out(1)))
    assert device.left_products(x, places, 1, left, right) is NotImplemented
    assert device.right_products(x, places, 1, left, right) is NotImplemented
    assert device.outer_products(x, places, 1, left, right) is NotImplemented
    assert device.orthonormalise(left, places[:, [3, 1]], 1) is NotImplemented
    assert device.orthonormalise(torch.zeros(64), torch.tensor([[0, 1]]), 64) is NotImplemented
