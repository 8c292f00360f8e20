"""Small models and loops that the scenes share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.where import WHERE

SHAPE = (32, 64, 64, 8)


def perceptron(seed: int = 0) -> nn.Module:
    """Three layers; the two large matrices are above the default policy's limit, the rest below."""
    torch.manual_seed(seed)
    a, b, c, d = SHAPE
    layers = nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c), nn.Tanh(), nn.Linear(c, d))
    return layers.to(WHERE)


def batch(step: int, rank: int | None = None, size: int = 16) -> tuple[Tensor, Tensor]:
    """A batch of this rank's own data; targets follow from inputs, so that there is something to learn."""
    who = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1_000_003 * who + step)
    inputs = torch.randn(size, SHAPE[0], generator=generator)
    teacher = torch.randn(SHAPE[0], SHAPE[-1], generator=torch.Generator().manual_seed(5))
    return inputs.to(WHERE), torch.tanh(inputs @ teacher / 4).to(WHERE)


def optimizer_of(module: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """Plain SGD, so that a gradient's fate shows in the parameters undistorted."""
    return torch.optim.SGD(module.parameters(), lr=lr)


def train(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    steps: range,
    loss_of: Callable[[Any, Tensor], Tensor] = nn.functional.mse_loss,
) -> list[float]:
    """The losses of `steps`."""
    losses = []
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = loss_of(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def digest(module: nn.Module) -> str:
    """A fingerprint of every bit of the parameters, or of their shards on this rank."""
    hashed = hashlib.sha256()
    for parameter in module.parameters():
        hashed.update(
            getattr(parameter, "_local_tensor", parameter)
            .detach()
            .cpu()
            .contiguous()
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
    return hashed.hexdigest()[:16]


def gradients(module: nn.Module) -> list[Tensor]:
    """Copies, zeros where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
