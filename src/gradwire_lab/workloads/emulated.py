"""Emulated network that sleeps instead of computing: true gradient shapes and ready times, hardly any CPU
time.

Several ranks on few cores cannot compute a published network at once. But they can wait for the time of its
computation, and hand over gradients of its shapes at the times at which they would have become ready. Like a
GPU, the emulated accelerator runs on while the host is busy: a communication hook inside the backward pass
delays nothing, unless it takes longer than the remaining computation.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.planning.shapes import Profile
from gradwire.step.layout import TINY_ELEMENTS
from gradwire_lab.workloads.base import Batch, Parameters, check_rank, seeded
from gradwire_lab.workloads.profile import Timing, shrunk

_LENGTH = 1 << 22
_WINDOW = 1 << 18
_SCALE = 1e-2
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = (1 << 64) - 1


class Draws:
    """A buffer of products of two normal numbers (kurtosis 9, where a normal number has 3).

    It is drawn from torch's global generator, so build it inside `seeded`.
    """

    def __init__(self) -> None:
        self._buffer = torch.randn(_LENGTH).mul_(torch.randn(_LENGTH))

    def gradient(self, shape: torch.Size, key: tuple[int, ...]) -> Tensor:
        """Fresh memory of `shape`, a function of `key` alone; small where many weights share an output."""
        out = torch.empty(shape)
        flat, scale = out.view(-1), _SCALE / math.sqrt(max(out[0].numel(), 1) if out.dim() > 1 else 1)
        state = 0
        for part in key:
            state = mixed(state ^ (part & _WORD))
        for start in range(0, flat.numel(), _WINDOW):
            length = min(_WINDOW, flat.numel() - start)
            state = mixed(state)
            place = state % (_LENGTH - length)
            torch.mul(self._buffer[place : place + length], scale, out=flat[start : start + length])
        return out


def mixed(state: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood 2014): every bit in moves every bit out."""
    state = (state + _MIX[0]) & _WORD
    state = ((state ^ (state >> 30)) * _MIX[1]) & _WORD
    state = ((state ^ (state >> 27)) * _MIX[2]) & _WORD
    return state ^ (state >> 31)


_BUCKET_MB = 25.0  # DDP's default
_LEARNING_RATE = 1e-3


class EmulatedWorkload:
    """`profile` shrunk by `shrink`, with sleeps of `timing` times `time_scale`."""

    batch_size = 1

    def __init__(self, profile: Profile, timing: Timing, shrink: float, time_scale: float) -> None:
        if not time_scale > 0:
            raise ValueError(f"time_scale={time_scale} must be above 0")
        self.name = f"emulated({profile.model})"
        self.profile = shrunk(profile, shrink)
        self._published = profile
        self._timing = timing
        self._shrink = shrink
        self._time_scale = time_scale

    @property
    def bucket_cap_mb(self) -> float | None:
        """DDP's bucket size of 25 MB, shrunk like the model, so that it has as many buckets as the published
        one.
        """
        return None if self._shrink == 1 else _BUCKET_MB / self._shrink

    @property
    def policy(self) -> str | None:
        """The limit of tiny tensors, shrunk like the model: the same tensors as in the published one."""
        return None if self._shrink == 1 else f"by_size(smallest={round(TINY_ELEMENTS / self._shrink)})"

    @property
    def before_s(self) -> float:
        """Sleep of the forward pass."""
        return self._timing.before_s * self._time_scale

    @property
    def backward_s(self) -> float:
        """Sleep of the backward pass, all layers together."""
        return self._timing.backward_s * self._time_scale

    @property
    def allreduce_s(self) -> float:
        """Time of a dense all-reduce on the published link, times `time_scale`."""
        return self._timing.allreduce_s * self._time_scale

    def suggested_rate_bit_per_s(self, world: int) -> float:
        """The link at which a ring all-reduce of this (shrunk) gradient takes `allreduce_s`.

        2(N - 1)/N of the gradient leaves every rank; latency is not counted. One rank alone sends nothing,
        so any rate does; the limit for many ranks is given.
        """
        share = 2 * (world - 1) / world if world > 1 else 2.0
        return share * 4 * self.profile.parameters * 8 / self.allreduce_s

    def model(self, seed: int) -> nn.Module:
        return SleepingModel(self.profile, self.before_s, self.backward_s, seed)

    def optimizer(self, params: Parameters) -> torch.optim.Optimizer:
        # the published optimizer would cost real CPU time for its state, which the published times include
        return torch.optim.SGD(params, _LEARNING_RATE)

    def batches(self, rank: int, world: int, seed: int) -> Iterator[Batch]:
        """(seed, rank, step) as one int64 tensor of 3: all that the gradients depend on."""
        check_rank(rank, world)
        return ((torch.tensor([seed, rank, step]),) for step in count())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Always 0; its gradients are drawn, not derived."""
        out: Tensor = model(batch[0])
        return out

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "network": self.profile.source,
            "parameters": self.profile.parameters,
            "published_parameters": self._published.parameters,
            "shrink": self._shrink,
            "shrink_actual": self._published.parameters / self.profile.parameters,
            "time_scale": self._time_scale,
            "before_s": self.before_s,
            "backward_s": self.backward_s,
            "allreduce_s": self.allreduce_s,
            "ccr": self._timing.allreduce_s / self._timing.backward_s,
            "compute_from": self._timing.compute_from,
            "link_from": self._timing.link_from,
            "suggested_bucket_cap_mb": _BUCKET_MB / self._shrink,
            "suggested_policy": self.policy,
            "data": "none: gradients are pseudo-random and heavy-tailed, compute is a calibrated sleep",
            "batch_size": self.batch_size,
            "optimizer": f"SGD(lr={_LEARNING_RATE})",
        }


@dataclass(frozen=True)
class _Step:
    """Input of one backward pass; `started` holds its start time as soon as it has begun."""

    key: tuple[int, int, int]
    draws: Draws
    started: list[float]

    def elapsed_until(self, deadline_s: float) -> None:
        """Sleeps until `deadline_s` after the start; deadlines are absolute, so no overshoot adds up."""
        remaining = self.started[0] + deadline_s - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)


class _LayerFunction(torch.autograd.Function):
    """Hands `token` on; in backward, waits and returns drawn gradients for the layer's parameters."""

    @staticmethod
    def forward(ctx: Any, step: _Step, layer: "_EmulatedLayer", token: Tensor, *parameters: Tensor) -> Tensor:
        ctx.step, ctx.layer = step, layer
        ctx.shapes = [parameter.shape for parameter in parameters]
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step: _Step = ctx.step
        if not step.started:
            step.started.append(time.perf_counter())
        drawn = [
            step.draws.gradient(shape, (*step.key, ctx.layer.first + index))
            for index, shape in enumerate(ctx.shapes)
        ]
        step.elapsed_until(ctx.layer.ready_s)
        return (None, None, grads[0], *drawn)


class _EmulatedLayer(nn.Module):
    """Parameters of one layer; `ready_s` after backward began its gradients are there."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], first: int, ready_s: float) -> None:
        super().__init__()
        self.first = first  # number of this layer's first tensor within the network
        self.ready_s = ready_s
        self.tensors = nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes)

    def forward(self, step: _Step, token: Tensor) -> Tensor:
        out: Tensor = _LayerFunction.apply(step, self, token, *self.tensors)  # type: ignore[no-untyped-call]
        return out


class SleepingModel(nn.Module):
    """Sleeps `before_s` in forward and `backward_s` in backward, shared out by the layers' multiply-adds."""

    def __init__(self, profile: Profile, before_s: float, backward_s: float, seed: int) -> None:
        super().__init__()
        self.before_s = before_s
        # backward visits the layers in reverse: a layer is ready when it and all after it are done
        behind = list(accumulate(layer.macs for layer in reversed(profile.layers)))[::-1]
        first = list(accumulate((len(layer.shapes) for layer in profile.layers), initial=0))
        with seeded(seed):
            self.draws = Draws()
            self.layers = nn.ModuleList(
                _EmulatedLayer(layer.shapes, first[index], backward_s * behind[index] / max(behind[0], 1))
                for index, layer in enumerate(profile.layers)
            )

    def forward(self, key: Tensor) -> Tensor:
        """(seed, rank, step) -> a loss of 0."""
        deadline = time.perf_counter() + self.before_s
        seed, rank, number = (int(part) for part in key)
        step = _Step((seed, rank, number), self.draws, [])
        token = torch.zeros(())
        for layer in self.layers:
            token = layer(step, token)
        time.sleep(max(deadline - time.perf_counter(), 0.0))
        return token
