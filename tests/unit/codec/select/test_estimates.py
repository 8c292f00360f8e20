"""Thresholds from a sample and from fitted distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire.codec.select.threshold import threshold_of_sample
from gradwire.contrib.dgc import sampled_top_k
from gradwire.contrib.sidco import Sidco, mean_logarithm, pareto_threshold, sidco_top_k, stage_ratios
from gradwire.kernels.topk import topk_indices
from gradwire.unit.context import ExchangeContext
from tests.support.inputs import generator, normal
from tests.support.looped import looped

AT = ExchangeContext(step=4, unit=1, rank=0, world=3)
N = 400_000


def exponential() -> Tensor:
    return torch.empty(N).exponential_(generator=generator(1)) * normal(N).sign()


def pareto(shape: float) -> Tensor:
    """Quantiles of the generalised Pareto distribution, in mixed order."""
    uniform = (torch.randperm(N, generator=generator(2)) + 0.5).double() / N
    return ((uniform**-shape - 1) / shape).float()


def share_reaching(selector: Sidco, x: Tensor) -> float:
    return int((x.abs() >= selector.threshold(x)).sum()) / x.numel()


@looped("stages", [1, 2, 3])
@looped("ratio", [0.5, 0.1, 0.01])
@looped("fit", ["exponential", "gamma", "pareto"])
def test_fit_of_an_exponential_finds_the_share(ratio: float, stages: int, fit) -> None:
    # 4000 elements or more are above: their number scatters by 2 %, and the fit's parameters by less; the
    # gamma's threshold is an approximation around shape 1.
    assert share_reaching(sidco_top_k(ratio, stages, fit), exponential()) == pytest.approx(ratio, rel=0.08)


@looped("shape", [-0.3, 0.2])
def test_fit_of_a_generalised_pareto_finds_the_share_and_the_exponential_does_not(shape: float) -> None:
    x = pareto(shape)
    assert share_reaching(sidco_top_k(0.01, 1, "pareto"), x) == pytest.approx(0.01, rel=0.1)
    assert share_reaching(sidco_top_k(0.01, 1), x) != pytest.approx(0.01, rel=0.4)


@looped("fit", ["exponential", "gamma", "pareto"])
def test_a_fit_does_not_depend_on_the_unit_of_its_elements(fit) -> None:
    select, scale = sidco_top_k(0.01, fit=fit), 2.0**-40  # far below the resolution of 1
    assert select.threshold(scale * exponential()) == pytest.approx(scale * select.threshold(exponential()))


def test_stages_correct_a_wrong_fit() -> None:
    # Magnitudes of normal elements fall faster than an exponential of their mean.
    x = normal(N)
    shares = [share_reaching(sidco_top_k(0.001, stages), x) for stages in (1, 2, 3, 4)]
    assert shares[0] < 0.00002
    assert shares == sorted(shares)
    assert shares[2:] == [pytest.approx(0.001, rel=0.4)] * 2


def test_single_stage_of_the_exponential_is_its_formula() -> None:
    x = normal(1000)
    for ratio in (0.01, 0.25, 0.9):
        assert sidco_top_k(ratio, 1).threshold(x) == pytest.approx(
            float(x.double().abs().mean()) * math.log(1 / ratio)
        )


@looped(("ratio", "stages"), [(0.001, 1), (0.001, 2), (0.01, 4), (0.25, 3), (0.7, 3), (0.2, 2)])
def test_shares_of_the_stages_multiply_to_the_ratio(ratio: float, stages: int) -> None:
    ratios = stage_ratios(ratio, stages)
    assert math.prod(ratios) == pytest.approx(ratio)
    assert len(ratios) == (1 if ratio >= 0.25 else stages)
    assert len(ratios) == 1 or ratios[0] == 0.25


def test_pareto_is_continuous_where_it_becomes_the_exponential() -> None:
    middle = pareto_threshold(1.0, 1.0, 0.01)
    assert middle == pytest.approx(math.log(100))
    for variance in (1.0 - 1e-9, 1.0 + 1e-9):
        assert pareto_threshold(1.0, variance, 0.01) == pytest.approx(middle, rel=1e-6)
    assert pareto_threshold(2.0, 0.0, 0.01) == 2.0


def test_mean_of_logarithms_leaves_out_zeros_over_any_number_of_blocks() -> None:
    x = normal(2**20 + 5)
    x[::3] = 0.0
    kept = x[x != 0].double()
    assert mean_logarithm(x) == pytest.approx(float(kept.abs().log().mean()), rel=1e-6)
    assert mean_logarithm(torch.zeros(5)) == 0.0


@looped("select", [sidco_top_k(0.01), sidco_top_k(0.01, 3, "gamma"), sidco_top_k(0.01, 2, "pareto")])
@looped("x", [torch.zeros(0), torch.tensor([1.0, torch.nan]), torch.tensor([torch.inf])])
def test_without_a_mean_there_is_no_threshold(select: Sidco, x: Tensor) -> None:
    assert math.isnan(select.threshold(x))


def test_sidco_outside_its_range_raises() -> None:
    with pytest.raises(ValueError, match="stages=0"):
        sidco_top_k(0.01, stages=0)
    with pytest.raises(ValueError, match="none of exponential, gamma, pareto"):
        sidco_top_k(0.01, fit="normal")


@looped("make", [normal, lambda n: torch.arange(n) * 1.0, lambda n: torch.ones(n)])
def test_all_as_a_sample_give_the_k_th_largest(make: Callable[[int], Tensor]) -> None:
    x = make(5000)
    assert sampled_top_k(0.01, sample=1.0).threshold(x, AT) == float(x.abs().sort().values[-50])
    assert torch.equal(sampled_top_k(0.01, sample=1.0).select(x, AT), topk_indices(x, 50))


def test_sample_is_of_the_share_but_holds_two_that_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradwire.contrib import dgc

    sizes = []

    def noting(x: Tensor, size: int, rank: int, ctx: ExchangeContext) -> float:
        sizes.append((size, rank))
        return threshold_of_sample(x, size, rank, ctx)

    monkeypatch.setattr(dgc, "threshold_of_sample", noting)
    for numel, ratio in ((100_000, 0.01), (100_000, 0.0001), (1000, 0.01), (100, 0.01)):
        sampled_top_k(ratio).select(normal(numel), AT)
    assert sizes == [(1000, 10), (20_000, 2), (200, 2), (100, 1)]


def test_ranks_and_steps_draw_other_samples_and_all_come_near() -> None:
    x, thresholds = normal(N), set()
    for rank, step in ((0, 0), (1, 0), (0, 1)):
        threshold = sampled_top_k(0.01, 0.1).threshold(x, replace(AT, rank=rank, step=step))
        # 400 of 40 000 reach it in the sample: ± 5 % each, four times that granted.
        assert int((x.abs() >= threshold).sum()) == pytest.approx(4000, rel=0.2)
        thresholds.add(threshold)
    assert len(thresholds) == 3


def test_poison_in_the_sample_is_the_largest() -> None:
    x = torch.full((100,), torch.nan)
    assert sampled_top_k(0.1, 1.0).threshold(x, AT) == math.inf


@looped("sample", [0.0, 1.1, math.nan])
def test_sample_outside_its_range_raises(sample: float) -> None:
    with pytest.raises(ValueError, match=r"outside \(0, 1\]"):
        sampled_top_k(0.01, sample)
