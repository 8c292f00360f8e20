"""What may be lost of a gradient moves no parameter by more than a unit in the last place per rounding.

Against the optimizers of torch themselves, in float64: their own errors there are 2^-53 of the numbers in
question, and the bound is 2^-24 of them, in 16-bit types 2^-13.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.metric import SHARE, numerators, thresholds
from tests.support.looped import looped
from tests.support.optimizers import (
    CASES,
    Case,
    N,
    context_of,
    draw,
    rest,
    second_moment_factor,
    stepped,
    trained,
)

WORLDS = (1, 4, 64)


def ulp(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Units in the last place of x in `dtype`, in float64."""
    info = torch.finfo(dtype)
    lowest = x.abs().to(dtype).double().clamp(min=info.smallest_normal)
    return info.eps * 2.0 ** (torch.frexp(lowest).exponent - 1).double()


def half_a_step(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """What one rounding by thresholds (N,) in `dtype` errs by at most, in float64."""
    bias = 15 if dtype == torch.float16 else 127
    step = 2.0 ** (exponent.double() - bias) * torch.finfo(dtype).eps
    return torch.where(exponent > 0, step / 2.0, 0.0)


def gradients(seed: int) -> list[Tensor]:
    """Next to nothing, like those before, and far beyond them."""
    return [draw(seed, low, low + 6).double() for low in (-40, -20, -8, 4)]


def moved(case: Case, steps: int, lost: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(…, N) how far, in ulp of θ', losing `lost` (N,) of the gradient moves the parameter at most."""
    _parameter, optimizer = trained(case, steps, dtype=dtype)
    unit = ulp(rest(optimizer), dtype)
    found = [
        (stepped(case, optimizer, gradient + sign * lost) - stepped(case, optimizer, gradient)).abs() / unit
        for gradient in gradients(77)
        for sign in (-1.0, 1.0)
    ]
    return torch.stack(found)


@looped("world", WORLDS)
@looped("steps", [0, 1, 2, 30])
@looped("case", CASES)
def test_a_rounding_per_rank_moves_a_parameter_by_no_more_ulp_than_ranks(
    case: Case, steps: int, world: int
) -> None:
    # Each of N roundings to nearest loses 2^(t − e − 1) units of 2^(e − 23) of a value with exponent e.
    lost = world * half_a_step(thresholds(N, context_of(*trained(case, steps))), torch.float32)
    assert (moved(case, steps, lost) <= world * case.factor).all()


@looped("dtype", [torch.bfloat16, torch.float16])
@looped("steps", [0, 30])
@looped("case", CASES)
def test_in_sixteen_bits_by_so_many_parts_of_those(case: Case, steps: int, dtype: torch.dtype) -> None:
    found = thresholds(N, context_of(*trained(case, steps, dtype=dtype)), dtype)
    lost = 4 * half_a_step(found, dtype)
    far = moved(case, steps, lost, dtype)
    assert (far <= 4 * SHARE[dtype] * case.factor).all()
    # In units of float32 it would be 2^11 times less.
    assert far[0].max() > SHARE[dtype] or steps == 0


@looped("case", CASES)
def test_so_do_levels(case: Case) -> None:
    # 2^(L − 1) units of 2^(e − 23), with |g|·2^L < |C|: less than 2^-24·|C|.
    for steps in (0, 1, 30):
        lost = numerators(N, context_of(*trained(case, steps))).double() * 2.0**-24
        assert (moved(case, steps, lost) <= case.factor).all()


@looped("case", CASES)
def test_the_bound_is_no_looser_than_it_says(case: Case) -> None:
    # A threshold is at most an octave below C, an ulp at most one above 2^-24 of θ': a loss that is four
    # times as large must show. Where g reaches the second moment it moves less, but for tiny gradients.
    exponent = thresholds(N, context_of(*trained(case, 30)))
    lost = 4.001 * half_a_step(exponent, torch.float32)
    assert (exponent > 0).all()
    assert (moved(case, 30, lost)[0] > 1.0).float().mean() > 0.9


def test_adams_factor_is_the_maximum_over_all_gradients() -> None:
    for beta1, beta2 in ((0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.9, 0.95)):
        c = beta1 / (beta2 - beta1**2) ** 0.5
        angle = torch.linspace(0.0, torch.pi / 2, 100_001, dtype=torch.float64)
        swept = angle.cos() ** 2 * (angle.cos() + c * angle.sin())
        assert float(swept.max()) == pytest.approx(second_moment_factor(beta1, beta2), rel=1e-8)
    assert second_moment_factor(0.99, 0.9) == float("inf")


def test_adam_comes_near_its_factor_when_all_gradients_before_conspire() -> None:
    # g_k ∝ (β1/β2)^(t − k) makes the most of a momentum of given second moment (Cauchy and Schwarz).
    beta1, beta2, steps = 0.9, 0.999, 400
    parameter = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = torch.optim.Adam([parameter], lr=1e-4)
    case = Case("Adam", lambda parameters: torch.optim.Adam(parameters, lr=1e-4))
    for k in range(steps):
        parameter.grad = torch.tensor([(beta1 / beta2) ** (steps - 1 - k)], dtype=torch.float64)
        optimizer.step()
    square = beta2 * optimizer.state[parameter]["exp_avg_sq"]
    slope = 1e-4 * (1 - beta1) / (1 - beta1 ** (steps + 1))
    reach = slope / ((square / (1 - beta2 ** (steps + 1))).sqrt() + 1e-8)
    worst = 0.0
    for tangent in torch.linspace(0.05, 2.0, 40).tolist():
        gradient = -tangent * square.sqrt() / (1 - beta2) ** 0.5
        step = gradient.abs() * 1e-6
        change = stepped(case, optimizer, gradient + step) - stepped(case, optimizer, gradient)
        worst = max(worst, float((change / step / reach).abs()))
    assert 0.97 * second_moment_factor(beta1, beta2) < worst <= second_moment_factor(beta1, beta2) * 1.0001
