"""Real optimizers of torch after some steps, and the same step in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.unit.context import ExchangeContext, Replicated

N = 400
Optimizer = torch.optim.Optimizer
Build = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Case:
    """An optimizer, and what a parameter becomes without the step's gradient (θ')."""

    name: str
    build: Build
    factor: float = 1.0

    def __str__(self) -> str:
        return self.name


def case(kind: type[Optimizer], factor: float = 1.0, **options: Any) -> Case:
    """By its options."""
    name = f"{kind.__name__}({', '.join(f'{key}={value}' for key, value in options.items())})"
    return Case(name, lambda parameters: kind(parameters, **options), factor)


def second_moment_factor(beta1: float, beta2: float) -> float:
    """How much more than a unit per rounding Adam may move, at worst, because g is in the second moment too.

    With a = √(β2·v) of the past and y = √(1 − β2)·|g|, both parts of v = a² + y², the derivative of Adam's
    step by g is that with v held at a² times cos²φ·(cos φ ± c·sin φ), tan φ = y/a, where by Cauchy and
    Schwarz |m| ≤ c·(1 − β1)/β1·a/√(1 − β2) bounds the past's part of the momentum, c = β1/√(β2 − β1²).
    """
    if beta1**2 >= beta2:
        return math.inf
    c = beta1 / math.sqrt(beta2 - beta1**2)
    # d/dφ [cos³φ + c·cos²φ·sin φ] = cos φ·(c·cos²φ − 3·cos φ·sin φ − 2c·sin²φ), a quadratic in tan φ.
    tangent = (-3.0 + math.sqrt(9.0 + 8.0 * c * c)) / (4.0 * c) if c else 0.0
    cosine = 1.0 / math.sqrt(1.0 + tangent * tangent)
    return cosine**3 * (1.0 + c * tangent)


ADAM = 1.4656
"""`second_moment_factor(0.9, 0.999)`, rounded up."""

CASES = (
    case(torch.optim.SGD, lr=0.1),
    case(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    case(torch.optim.SGD, lr=torch.tensor(0.1), foreach=False),
    case(torch.optim.SGD, lr=0.05, momentum=0.9),
    case(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=1e-3),
    case(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    case(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    case(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    case(torch.optim.Adagrad, lr=0.01, lr_decay=0.1, weight_decay=0.01),
    case(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    case(torch.optim.RMSprop, lr=1e-3),
    case(torch.optim.RMSprop, lr=1e-3, alpha=0.9, weight_decay=0.01),
    case(torch.optim.Adam, ADAM, lr=1e-3),
    case(torch.optim.Adam, ADAM, lr=1e-3, weight_decay=0.01, foreach=True),
    case(torch.optim.Adam, ADAM, lr=1e-3, fused=True),
    case(torch.optim.Adam, lr=1e-3, betas=(0.0, 0.99)),
    case(torch.optim.AdamW, ADAM, lr=1e-3, weight_decay=0.1),
    case(torch.optim.AdamW, ADAM, lr=1e-3, weight_decay=0.1, fused=True),
)


def draw(seed: int, low: int = -14, high: int = 2) -> Tensor:
    """Numbers of both signs and many magnitudes."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(N, generator=random) * 2.0 ** torch.randint(low, high, (N,), generator=random)


def trained(
    case: Case, steps: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[nn.Parameter, Optimizer]:
    """A parameter and its optimizer after some steps of random gradients in float32, then in `dtype`.

    But for the state beside a float16 parameter: second moments are below its range, which ruins Adam itself.
    """
    parameter = nn.Parameter(draw(seed))
    optimizer = case.build([parameter])
    for step in range(steps):
        parameter.grad = draw(1000 * seed + step + 1, -24, -4)
        optimizer.step()
    parameter.grad = None
    parameter.data = parameter.data.to(dtype)
    for name, value in optimizer.state.get(parameter, {}).items():
        if dtype != torch.float16 and isinstance(value, Tensor) and value.shape == parameter.shape:
            optimizer.state[parameter][name] = value.to(dtype)
    return parameter, optimizer


def context_of(parameter: nn.Parameter, optimizer: Optimizer, **options: Any) -> ExchangeContext:
    """A moment in which a unit is that parameter."""
    state = optimizer.state.get(parameter, {})
    seen = Replicated(parameter.detach(), optimizer.param_groups[0], state, type(optimizer))
    return ExchangeContext(0, 0, 0, 1, replicas=lambda _name: seen, **options)


def stepped(case: Case, optimizer: Optimizer, gradient: Tensor) -> Tensor:
    """What the optimizer makes of its parameter (N,) with a `gradient` in float64, all in float64.

    The optimizer itself stays as it is. Its hyperparameters count as they are, without a rounding.
    """
    (old,) = optimizer.param_groups[0]["params"]
    parameter = nn.Parameter(old.detach().double().clone())
    exact = case.build([parameter])
    state = copy.deepcopy(dict(optimizer.state.get(old, {})))
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == old.shape:
            state[name] = value.double()
    if state:
        exact.state[parameter] = state
    parameter.grad = gradient.clone()
    exact.step()
    return parameter.detach()


def rest(optimizer: Optimizer) -> Tensor:
    """θ' (N,) in float64: the parameter after the next step, without what the step's gradient does.

    Of second moments the part that no gradient can take away.
    """
    (parameter,) = optimizer.param_groups[0]["params"]
    group, state = optimizer.param_groups[0], optimizer.state.get(parameter, {})
    theta, rate, decay = parameter.detach().double(), float(group["lr"]), float(group["weight_decay"])
    step = float(state.get("step", 0.0)) + 1.0
    zero = torch.zeros_like(theta)
    match optimizer:
        case torch.optim.SGD():
            momentum, buffer = group["momentum"], state.get("momentum_buffer")
            old = zero if buffer is None else buffer.double()
            if group["nesterov"]:
                return theta * (1 - rate * decay * (1 + momentum)) - rate * momentum**2 * old
            share = 1.0 if buffer is None else 1.0 - group["dampening"]
            return theta * (1 - rate * share * decay) - rate * momentum * old
        case torch.optim.Adagrad():
            rate /= 1 + (step - 1) * group["lr_decay"]
            return theta * (1 - rate * decay / (state["sum"].double().sqrt() + group["eps"]))
        case torch.optim.RMSprop():
            square = group["alpha"] * state.get("square_avg", zero).double()
            return theta * (1 - rate * decay / (square.sqrt() + group["eps"]))
    beta1, beta2 = group["betas"]
    square = beta2 * state.get("exp_avg_sq", zero).double() / (1 - beta2**step)
    reach = rate / (1 - beta1**step) / (square.sqrt() + group["eps"])
    old = reach * beta1 * state.get("exp_avg", zero).double()
    if isinstance(optimizer, torch.optim.AdamW):
        return theta * (1 - rate * decay) - old
    return theta * (1 - reach * (1 - beta1) * decay) - old
