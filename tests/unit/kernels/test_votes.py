"""Ballots, tally and winners, against the reference and against signs that are added up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.kernels.votes import apply_votes, ballot_words, cast_votes, count_groups, tally
from tests.support.inputs import KINDS, generator, normal
from tests.support.looped import looped

PARTS = ((0,), (1,), (63,), (64,), (65,), (4097,), (9001, 0, 5, 130, 1), (64, 64, 8192, 61))

every_parts = looped("sizes", PARTS)


def cast_by(module, x: Tensor, sizes: tuple[int, ...], shares: int = 1) -> tuple[Tensor, Tensor, int]:
    groups = -(-count_groups(sizes) // shares)
    rows = torch.zeros(shares, ballot_words(groups), dtype=torch.int64)
    means = torch.full((len(sizes),), torch.nan)
    module(x, sizes, groups, rows, means)
    return rows, means, groups


@every_parts
@looped("shares", [1, 3, 4])
@looped("kind", KINDS)
def test_ballots_of_the_reference(kind, shares: int, sizes: tuple[int, ...]) -> None:
    x = kind(sum(sizes))
    x[: x.numel() // 2] *= (torch.arange(x.numel() // 2) // 100) % 2  # groups of zeros, too
    rows, means, _ = cast_by(cast_votes, x, sizes, shares)
    expected, expected_means, _ = cast_by(cast_votes.plain, x, sizes, shares)
    assert torch.equal(rows, expected)
    # Sums in float64 of other orders, rounded once to float32: neighbours at most.
    torch.testing.assert_close(means, expected_means, rtol=2.0**-23, atol=2.0**-149, equal_nan=True)


@looped("voters", [1, 2, 3, 4, 5, 7, 8, 16, 31])
@looped("groups", [0, 1, 64, 65, 200])
def test_tally_of_the_reference(voters: int, groups: int) -> None:
    bits = torch.iinfo(torch.int64)
    words = ballot_words(groups)
    ballots = torch.randint(bits.min, bits.max, (voters, words), generator=generator(groups))
    assert torch.equal(tally(ballots, groups), tally.plain(ballots, groups))


@every_parts
@looped("voters", [1, 2, 3, 4, 5])
@looped("shares", [1, 2, 3])
def test_from_elements_to_winners(voters: int, sizes: tuple[int, ...], shares: int) -> None:
    inputs = [normal(sum(sizes) + rank)[rank:] for rank in range(voters)]
    for rank, x in enumerate(inputs):
        x[: x.numel() * rank // voters] = 0.0
    ballots = [cast_by(cast_votes, x, sizes, shares)[0] for x in inputs]
    groups = -(-count_groups(sizes) // shares)
    results = torch.stack([tally(torch.stack([b[r] for b in ballots]), groups) for r in range(shares)])
    levels, out = torch.arange(1.0, len(sizes) + 1), torch.full((sum(sizes),), torch.nan)
    apply_votes(results, sizes, levels, out)
    assert torch.equal(out, by_hand(inputs, sizes, levels))
    slow = torch.full_like(out, torch.nan)
    apply_votes.plain(results, sizes, levels, slow)
    assert torch.equal(slow, out)


def by_hand(inputs: list[Tensor], sizes: tuple[int, ...], levels: Tensor) -> Tensor:
    """Element by element: signs of those whose group is not all zero."""
    parts = []
    for number, pieces in enumerate(zip(*(x.split(list(sizes)) for x in inputs), strict=True)):
        votes = torch.zeros(sizes[number])
        for piece in pieces:
            for start in range(0, sizes[number], 64):
                group = piece[start : start + 64]
                if group.any():
                    votes[start : start + 64] += torch.where(group >= 0, 1.0, -1.0)
        parts.append(votes.sign() * levels[number])
    return torch.cat(parts)


@looped("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_take_the_reference_path(dtype: torch.dtype) -> None:
    sizes = (130, 7)
    x, out = normal(137).to(dtype), torch.empty(137, dtype=dtype)
    rows, means = torch.zeros(1, ballot_words(4), dtype=torch.int64), torch.empty(2, dtype=dtype)
    cast_votes(x, sizes, 4, rows, means)
    apply_votes(tally(rows, 4)[None], sizes, torch.ones(2, dtype=dtype), out)
    assert torch.equal(out, x.sign())


@looped("dtype", [torch.float32, torch.float64])
def test_the_mean_of_the_largest_numbers_does_not_overflow(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    means = torch.empty(1, dtype=dtype)
    rows = torch.zeros(1, ballot_words(79), dtype=torch.int64)
    cast_votes(torch.full((5000,), -largest, dtype=dtype), (5000,), 79, rows, means)
    assert means[0] == largest


def test_slices_of_larger_memory_are_written_nowhere_else() -> None:
    buffer, results = torch.full((102,), 7.0), tally(torch.full((1, 3), -1, dtype=torch.int64), 2)[None]
    apply_votes(results, (100,), torch.tensor([2.0]), buffer[1:-1])
    assert (buffer[1:-1] == 2.0).all()
    assert buffer[0] == buffer[-1] == 7.0


def test_sizes_that_do_not_fit_raise_instead_of_reading_beyond_the_end() -> None:
    x, rows = torch.zeros(65), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        cast_votes(x, (64,), 2, rows, torch.empty(1))
    with pytest.raises(ValueError, match="no ballots"):
        cast_votes(x, (65,), 1, rows[:, :2], torch.empty(1))
    with pytest.raises(ValueError, match="no ballots"):
        tally(rows, 3)
    with pytest.raises(ValueError, match="no results"):
        apply_votes(torch.zeros(1, 2, 1, dtype=torch.int64), (65,), torch.empty(1), x)
    with pytest.raises(ValueError, match="do not fit"):
        apply_votes(torch.zeros(1, 2, 2, dtype=torch.int64), (64,), torch.empty(1), x)
