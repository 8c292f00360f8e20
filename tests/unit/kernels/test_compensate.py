"""The one-pass compensation against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.kernels import slices
from gradwire.kernels.compensation import Findings, compensate, compensate_momentum, mask_zeros
from gradwire.kernels.pieces import Pieces
from tests.support.inputs import KINDS
from tests.support.looped import looped

SIZES = (0, 1, 2, 4095, 4096, 4097, 12_289, 100_003)
INF, NAN = float("inf"), float("nan")


def findings(any_gradient: bool, finite: bool) -> Findings:
    """What the reference says of one gradient, as `compensate` says it of a single piece."""
    return Findings(() if any_gradient else (0,), finite)


def pair(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=generator), torch.randn(n, generator=generator)


def both(committed: Tensor, grad: Tensor, coefficient: float, scale: float) -> tuple[Tensor, Tensor]:
    fast, slow = torch.full_like(committed, NAN), torch.full_like(committed, NAN)
    flags = compensate(fast, committed, grad, coefficient, scale)
    assert flags == compensate.plain(slow, committed, grad, coefficient, scale)
    return fast, slow


@looped("n", SIZES)
@looped(("coefficient", "scale"), [(1.0, 1.0), (0.7, 1.0), (0.0, 1.0), (0.5, 0.25)])
def test_bits_of_the_reference_when_the_scale_is_a_power_of_two(
    n: int, coefficient: float, scale: float
) -> None:
    # Then the product of scale and gradient is exact, and one rounding is left on either path.
    fast, slow = both(*pair(n), coefficient, scale)
    assert torch.equal(fast, slow)


@looped("n", SIZES)
def test_within_one_rounding_of_the_reference_for_any_scale(n: int) -> None:
    # The reference may fuse multiply and add, which saves the rounding of scale · gradient: half an ulp.
    committed, grad = pair(n)
    fast, slow = both(committed, grad, 0.9, 0.3)
    magnitude = 0.9 * committed.abs() + 0.3 * grad.abs()
    assert ((fast - slow).abs() <= torch.finfo(torch.float32).eps * magnitude).all()


TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
kinds = st.sampled_from(KINDS)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(kinds, kinds, st.sampled_from(SIZES[:-1]), st.sampled_from(TYPES), st.sampled_from([1.0, 0.5, 0.0]))
def test_every_kind_of_memory_and_gradient_compensates_to_the_references_bits(
    old: Callable[[int], Tensor],
    new: Callable[[int], Tensor],
    n: int,
    dtype: torch.dtype,
    coefficient: float,
) -> None:
    # Coefficients are powers of two, so that on either path only the sum is rounded; below the normal range
    # half of a subnormal would be, too.
    committed, grad = old(n).to(dtype), new(n).to(dtype)
    fast, slow = both(committed, grad, coefficient, 1.0)
    if coefficient == 0.5:
        tiny = committed.abs() < 2 * torch.finfo(dtype).smallest_normal
        fast, slow = fast[~tiny], slow[~tiny]
    assert torch.equal(fast.isnan(), slow.isnan())
    assert torch.equal(fast.nan_to_num(0.0, INF, -INF), slow.nan_to_num(0.0, INF, -INF))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(kinds, kinds, st.sampled_from(SIZES[:-1]), st.sampled_from(TYPES))
def test_gradients_of_a_shorter_type_are_added_in_float32(
    old: Callable[[int], Tensor], new: Callable[[int], Tensor], n: int, dtype: torch.dtype
) -> None:
    committed, grad = old(n), new(n).to(dtype)
    fast, slow = both(committed, grad, 1.0, 1.0)
    assert torch.equal(fast.isnan(), slow.isnan())
    assert torch.equal(fast.nan_to_num(0.0, INF, -INF), slow.nan_to_num(0.0, INF, -INF))


@looped("n", [1, 2, 4095, 4096, 4097, 100_003])
@looped("value", [NAN, INF, -INF])
@looped("where", ["memory", "gradient"])
def test_one_poisoned_element_is_seen_wherever_it_is(n: int, value: float, where: str) -> None:
    for position in {0, n // 2, n - 1}:
        committed, grad = torch.zeros(n), torch.zeros(n)
        (committed if where == "memory" else grad)[position] = value
        seen = compensate(torch.empty(n), committed, grad, 1.0)
        assert seen == findings(where == "gradient", False)


def test_sum_that_overflows_is_not_finite() -> None:
    big = torch.full((5,), 3e38)
    assert not compensate(torch.empty(5), big, big, 1.0).finite


@looped("n", [1, 4096, 4097])
def test_smallest_gradient_counts_and_zeros_of_either_sign_do_not(n: int) -> None:
    committed, grad = torch.ones(n), torch.zeros(n)
    grad[n // 2] = -0.0
    assert compensate(torch.empty(n), committed, grad, 1.0).idle == (0,)
    grad[-1] = 1e-45
    assert compensate(torch.empty(n), committed, grad, 1.0).idle == ()


def test_subnormals_survive() -> None:
    tiny = torch.full((9,), 1e-44)
    working = torch.empty(9)
    compensate(working, tiny, tiny, 1.0)
    assert torch.equal(working, tiny + tiny)


@looped("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_take_the_reference_path(dtype: torch.dtype) -> None:
    committed, grad = (half.to(dtype) for half in pair(101))
    fast, slow = both(committed, grad, 0.6, 1.5)
    assert fast.dtype == dtype
    assert torch.equal(fast, slow)


def test_strided_views_take_the_reference_path_and_leave_the_gaps_alone() -> None:
    buffer = torch.full((200,), 7.0)
    committed, grad = pair(100)
    compensate(buffer[::2], committed, grad, 1.0)
    assert torch.equal(buffer[::2], committed + grad)
    assert (buffer[1::2] == 7.0).all()


def test_slices_of_larger_memory_are_written_nowhere_else() -> None:
    buffer = torch.full((5002,), 7.0)
    committed, grad = pair(5000)
    compensate(buffer[1:-1], committed, grad, 1.0)
    assert torch.equal(buffer[1:-1], committed + grad)
    assert buffer[0] == buffer[-1] == 7.0


@looped("short", [0, 1, 2])
def test_unequal_sizes_raise_instead_of_reading_beyond_the_end(short: int) -> None:
    tensors = [torch.zeros(9 if number == short else 10) for number in range(3)]
    with pytest.raises(ValueError, match="shapes differ"):
        compensate(*tensors, 1.0)


@looped("n", SIZES)
@looped("nesterov", [True, False])
def test_momentum_within_two_roundings_of_the_reference(n: int, nesterov: bool) -> None:
    (v, u), (grad, _) = pair(n), pair(n + 1)
    grad = grad[:n]
    fast, slow = ((torch.full_like(v, NAN), torch.full_like(v, NAN)) for _ in range(2))
    flags = compensate_momentum(fast, (v, u), grad, 0.9, 0.5, nesterov=nesterov)
    assert flags == compensate_momentum.plain(slow, (v, u), grad, 0.9, 0.5, nesterov=nesterov)
    # The reference may fuse multiply and add: up to half an ulp for each of three products.
    bound = 3 * torch.finfo(torch.float32).eps * (v.abs() + 2 * u.abs() + 2 * grad.abs())
    assert all(((a - b).abs() <= bound).all() for a, b in zip(fast, slow, strict=True))


@looped("value", [NAN, INF, -INF])
@looped("where", ["v", "u", "gradient"])
def test_momentum_sees_one_poisoned_element(value: float, where: str) -> None:
    planes = {name: torch.zeros(5000) for name in ("v", "u", "gradient")}
    planes[where][4999] = value
    working = torch.empty(5000), torch.empty(5000)
    seen = compensate_momentum(working, (planes["v"], planes["u"]), planes["gradient"], 0.9)
    assert seen == findings(where == "gradient", False)


@looped("dtype", [torch.float32, torch.float64])
def test_zeros_are_masked_and_nothing_else(dtype: torch.dtype) -> None:
    like = torch.tensor([0.0, -0.0, 1e-45, NAN, INF, -2.0]).to(dtype)
    target = torch.arange(1.0, 7.0, dtype=dtype)
    mask_zeros(target, like)
    assert target.tolist() == [0.0, 0.0, 3.0, 4.0, 5.0, 6.0]


PIECES = ((5, 0, 3), (0, 9, 5), (20, 4, 4097), (8, 3, 0))


def scattered(numel: int, kind: int) -> list[Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(10 * kind + i)) for i in range(2)]


@looped("threads", [1, 3])
@looped("dtype", [torch.float32, torch.float64])
@looped("remembers", [True, False])
def test_pieces_are_compensated_as_one_by_one_and_nothing_beside_them(
    remembers: bool, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "free_threads", lambda: threads)
    monkeypatch.setattr(slices, "SMALLEST", 1000)
    old, bucket = (each.to(dtype) for each in scattered(5000, 1))
    bucket[9:14] = 0.0
    bucket[1500:4101] = 0.0  # most of the third piece, of which some threads see nothing else
    committed = old if remembers else None
    out, expected = torch.full_like(old, 7.0), torch.full_like(old, 7.0)
    for plane, here, size in PIECES:
        part = slice(plane, plane + size)
        compensate(expected[part], old[part] if remembers else None, bucket[here : here + size], 0.5, 2.0)
    seen = compensate(out, committed, bucket, 0.5, 2.0, Pieces(PIECES))
    assert torch.equal(out, expected)
    assert seen == ((1, 3), True)


@looped("threads", [1, 3])
def test_each_piece_has_a_scale_of_its_own_under_momentum(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "free_threads", lambda: threads)
    monkeypatch.setattr(slices, "SMALLEST", 1000)
    (v, u), (bucket, _) = scattered(5000, 1), scattered(5000, 2)
    outs, expected = torch.full((2, 5000), 7.0), torch.full((2, 5000), 7.0)
    scales = [0.5, 2.0, 0.25, 1.0]
    for (plane, here, size), scale in zip(PIECES, scales, strict=True):
        part, grad = slice(plane, plane + size), bucket[here : here + size]
        compensate_momentum((expected[0][part], expected[1][part]), (v[part], u[part]), grad, 0.5, scale)
    compensate_momentum((outs[0], outs[1]), (v, u), bucket, 0.5, scales, Pieces(PIECES))
    assert torch.equal(outs, expected)


def test_a_poisoned_piece_is_seen_among_others() -> None:
    bucket = torch.zeros(6000)
    bucket[4100] = NAN
    assert compensate(torch.zeros(5000), None, bucket, 1.0, 1.0, Pieces(PIECES)) == ((0, 1, 3), False)


@looped("kept", [torch.float64, torch.bfloat16])
def test_memory_in_another_type_is_widened_for_the_pieces_alone(kept: torch.dtype) -> None:
    old, bucket = scattered(5000, 3)
    committed, out = old.to(kept), torch.full((5000,), 7.0)
    compensate(out, committed, bucket, 0.5, 2.0, Pieces(PIECES))
    expected = torch.full((5000,), 7.0)
    compensate(expected, committed.float(), bucket, 0.5, 2.0, Pieces(PIECES))
    assert torch.equal(out, expected)


@looped("row", [(4998, 0, 3), (0, 5998, 3)])
def test_pieces_beyond_the_end_raise(row: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="too small for the pieces"):
        compensate(torch.zeros(5000), torch.zeros(5000), torch.zeros(6000), 1.0, 1.0, Pieces([row]))


def test_pieces_begin_within_their_tensors() -> None:
    with pytest.raises(ValueError, match="0 or later"):
        Pieces([(-1, 0, 3)])
