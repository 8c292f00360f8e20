"""What dgc chooses, and how much of the gradient that is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.kernels.topk import topk_indices
from gradwire.recipes import Composition, recipe
from tests.support.looped import looped
from tests.support.steps import step


def composed(text: str) -> Composition:
    return recipe(text).build()


def heavy(numel: int, seed: int) -> Tensor:
    """x·|x| of normal numbers: tails as heavy as those of gradients."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return x * x.abs()


def share(text: str, x: Tensor, number: int) -> float:
    """Energy of what one rank sends, over that of the 0.1 % of the largest elements."""
    exact = x[topk_indices(x, round(0.001 * x.numel()))]
    sent = step(composed(text).exchange, lambda _rank: x, 1, number)[0].mean
    return float(sent.double().square().sum() / exact.double().square().sum())


def test_by_default_all_of_the_energy_of_the_largest_is_sent() -> None:
    for seed, numel in enumerate((1_000_000, *[65_536] * 5)):
        assert share("dgc(warmup_steps=0)", heavy(numel, seed), seed) >= 0.999


def test_a_sample_is_an_option_and_loses_some_of_it() -> None:
    shares = [share("dgc(warmup_steps=0, sample=0.01)", heavy(65_536, seed), seed) for seed in range(10)]
    assert 0.5 < min(shares) < 0.98


@looped("sample", [0.0, 1.5])
def test_a_sample_outside_its_range_is_refused(sample: float) -> None:
    with pytest.raises(ValueError, match=r"outside \(0, 1\]"):
        recipe(f"dgc({sample=})")
