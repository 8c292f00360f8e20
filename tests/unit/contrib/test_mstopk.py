"""The fast bisection against that over everything, as the paper lists it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire.contrib import mstopk
from gradwire.contrib.mstopk import Bracket, bisect, ms_top_k
from gradwire.kernels.topk import topk_indices
from gradwire.unit.context import ExchangeContext
from tests.support.inputs import FINITE, normal
from tests.support.looped import looped

AT = ExchangeContext(step=4, unit=1, rank=0, world=3)
Kind = Callable[[int], Tensor]


def listing(x: Tensor, k: int, rounds: int) -> Bracket:
    """Algorithm 1 with counts over everything."""
    magnitudes = x.abs()
    mean, largest = float(magnitudes.double().mean()), float(magnitudes.max())
    low, high, upper, lower, above, below = 0.0, 1.0, math.inf, 0.0, 0, x.numel() + 1
    for _ in range(rounds):
        share = low + (high - low) / 2
        threshold = float(torch.tensor(mean + share * (largest - mean)))
        count = int((magnitudes >= threshold).sum())
        if count <= k:
            high = share
            if count > above:
                above, upper = count, threshold
        else:
            low = share
            if count < below:
                below, lower = count, threshold
    return Bracket(lower, upper, above, largest)


@pytest.mark.parametrize("kind", FINITE, ids=lambda kind: kind.__name__)
def test_bracket_is_that_of_the_listing_whatever_is_left_out_below_the_floor(kind: Kind) -> None:
    magnitudes = kind(4097).abs()
    mean = float(magnitudes.double().mean())
    for k in (1, 40, 400, 2000):
        for rounds in (1, 3, 25):
            listed = listing(magnitudes, k, rounds)
            for floor in (0.0, float(magnitudes.sort(descending=True).values[k])):
                few = magnitudes[magnitudes >= floor]
                if few.numel() > k:
                    bracket = bisect(few, k, mean, rounds)
                    assert (bracket.above, bracket.upper) == (listed.above, listed.upper)
                    assert (magnitudes >= bracket.lower).sum() == (magnitudes >= listed.lower).sum()


def test_wide_bracket_does_not_send_zeros_for_lack_of_rounds() -> None:
    # One round: 1.0 is above the threshold, 0.6 and 0.0 are not, and a run from anywhere may hold zeros only.
    x = torch.cat([torch.zeros(2000), torch.full((2000,), 0.6), torch.ones(1)])
    for step in range(20):
        chosen = ms_top_k(0.05, rounds=1).select(x, replace(AT, step=step))
        assert (x[chosen] >= 0.6).all()


@looped("kind", FINITE)
@looped("n", [2, 127, 4097, 40_009, 100_003])
def test_choice_is_that_of_the_listing(kind: Kind, n: int) -> None:
    x = kind(n)
    for ratio in (0.001, 0.01, 0.2, 0.45, 0.9):
        for rounds in (1, 2, 5, 25):
            selector = ms_top_k(ratio, rounds)
            k = selector.count(n, AT)
            if k == n:
                continue
            bracket, chosen = listing(x, k, rounds), selector.select(x, AT)
            if 2 * bracket.above < k and 2 * bracket.lower < min(bracket.upper, bracket.largest):
                assert torch.equal(chosen, topk_indices(x, k))
                continue
            above = x.abs() >= bracket.upper
            within = ((x.abs() >= bracket.lower) & ~above).nonzero().view(-1)
            taken = torch.zeros(n, dtype=torch.bool)
            taken[chosen] = True
            assert taken[above].all()
            run = taken[within].nonzero().view(-1)
            assert run.numel() == k - bracket.above
            # Round the end: the gap is then what is not taken.
            assert (run.diff() != 1).sum() <= 1, "not a run of neighbours"
            assert (run.diff() == 1).all() or (run[0] == 0 and run[-1] == within.numel() - 1)


def test_25_rounds_choose_nearly_the_top_k_of_a_gradient() -> None:
    # A bracket of 2^-25 of the range holds no more than a few normal elements.
    x = normal(100_003)
    overlap = set(ms_top_k(0.01).select(x, AT).tolist()) & set(topk_indices(x, 1000).tolist())
    assert len(overlap) >= 998


def test_run_starts_elsewhere_at_another_moment_or_on_another_rank() -> None:
    x = torch.ones(1000)
    starts = {
        int(ms_top_k(0.01).select(x, replace(AT, rank=rank, step=step))[0])
        for rank in (0, 1)
        for step in (0, 1)
    }
    assert len(starts) == 4


@looped("guess", [0.0, 0.5, math.inf])
def test_a_sample_that_misleads_changes_nothing(guess: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(40_009)
    honest = ms_top_k(0.01).select(x, AT)
    monkeypatch.setattr(mstopk, "threshold_of_sample", lambda *_: guess)
    assert torch.equal(ms_top_k(0.01).select(x, AT), honest)


def test_where_no_round_finds_a_lower_threshold_the_run_goes_through_everything() -> None:
    # Two elements beyond the reach of 25 halvings: no threshold lets in more than them.
    x = torch.full((1000,), 1e-3)
    x[[100, 900]] = 1e30
    chosen = ms_top_k(0.004).select(x, AT).tolist()
    run = [index for index in chosen if index not in (100, 900)]
    assert len(run) == 2
    assert {100, 900} <= set(chosen)
    assert chosen != topk_indices(x, 4).tolist()


def test_rounds_below_one_raise() -> None:
    with pytest.raises(ValueError, match="rounds=0"):
        ms_top_k(0.01, rounds=0)
