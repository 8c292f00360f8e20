"""C of δ = C/g for every optimizer, against table 2 of GComp (Li et al. 2024) written down anew."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.metric import numerators, thresholds
from tests.support.looped import looped
from tests.support.optimizers import CASES, Case, N, Optimizer, context_of, trained


def table_2(optimizer: Optimizer) -> Tensor:
    """|C| (N,) in float64. θ, b, m, r, v, η, λ, μ, τ, ε and t are the table's.

    Of second moments, what surely stays: the last step's, times α or β2.
    """
    (parameter,) = optimizer.param_groups[0]["params"]
    group, state = optimizer.param_groups[0], optimizer.state.get(parameter, {})
    θ, η, λ = parameter.detach().double(), float(group["lr"]), group["weight_decay"]
    t = float(state.get("step", 0.0)) + 1
    zeros = torch.zeros_like(θ)
    match optimizer:
        case torch.optim.SGD():
            # torch's first step takes the gradient as it is: b = g, without 1 − τ.
            μ, τ, b = group["momentum"], group["dampening"], state.get("momentum_buffer")
            τ, b = (0.0, zeros) if b is None else (τ, b.double())
            if group["nesterov"]:
                return (((1 - η * λ * (1 + μ)) * θ - η * μ**2 * b) / (η * (1 + μ))).abs()
            return ((θ - η * μ * b) / (η * (1 - τ)) - λ * θ).abs()
        case torch.optim.Adagrad():
            η, r = η / (1 + (t - 1) * group["lr_decay"]), state["sum"].double()
            return (θ * (r.sqrt() + group["eps"]) / η - λ * θ).abs()
        case torch.optim.RMSprop():
            v = group["alpha"] * state.get("square_avg", zeros).double()
            return (θ * (v.sqrt() + group["eps"]) / η - λ * θ).abs()
    (β1, β2), m = group["betas"], state.get("exp_avg", zeros).double()
    root = (β2 * state.get("exp_avg_sq", zeros).double() / (1 - β2**t)).sqrt() + group["eps"]
    if isinstance(optimizer, torch.optim.AdamW):
        return ((θ * root * (1 - β1**t) * (1 - η * λ) - η * β1 * m) / (η * (1 - β1))).abs()
    return ((θ * root * (1 - β1**t) - η * β1 * m) / (η * (1 - β1)) - λ * θ).abs()


@looped("steps", [0, 1, 2, 30])
@looped("case", CASES)
def test_numerators_and_thresholds_are_those_of_table_2(case: Case, steps: int) -> None:
    parameter, optimizer = trained(case, steps)
    exact, ctx = table_2(optimizer), context_of(parameter, optimizer)
    # Rounded down by 2^-23 and to float32. Terms of up to 2^12 |C| may cancel, each rounded to 2^-53.
    torch.testing.assert_close(numerators(N, ctx).double(), exact, rtol=2.0**-22, atol=0.0)
    assert torch.equal(thresholds(N, ctx), (exact.frexp().exponent + 126).clamp(0, 255).to(torch.uint8))
