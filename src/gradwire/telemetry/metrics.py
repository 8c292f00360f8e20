"""Flat numbers about the last step and the mean of recent ones, with units in their names."""

from __future__ import annotations

import math
from statistics import median

import torch
from torch import Tensor

from gradwire.comm import Round
from gradwire.memory import UNSENT
from gradwire.sources.source import Source
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.history import History
from gradwire.step.installed import InstalledRecipe
from gradwire.step.reducer import Backward

BOTH = {
    "bytes_sent": "metered_bytes",
    "backward_s": "backward_s",
    "compress_s": "compress_s",
    "exposed_s": "exposed_comm_s",
    "step_s": "step_s",
}
"""Metrics of the last step, which also have a mean, by the name of the field in `Cost`."""


def metrics_of(backward: Backward, source: Source, loss_scale: float) -> dict[str, float]:
    """The numbers of `Wire.metrics`, by name. Between steps, on the thread that trains.

    Args:
        backward: the exchange of one attached model.
        source: brings its gradients.
        loss_scale: factor by which these gradients are scaled.
    """
    backward.commit_deferred()
    reducer, history = backward.reducer, backward.history
    found: dict[str, float] = {
        "step": reducer.step,
        "skipped_steps": history.skipped,
        "dropped_steps": backward.optimizer_log.dropped,
    }
    found |= _costs(history, _dense_bytes(reducer))
    if (share := _share_of_linear(reducer, history)) is not None:
        found["share_of_linear"] = share
    if (ratio := _residual_to_gradient(reducer, source, loss_scale)) is not None:
        found["residual_to_gradient"] = ratio
    found |= {"memory_bytes": reducer.layout.memory_bytes, "compile_s": history.compile_s}
    found["health_warnings"] = len(reducer.health.complaints)
    link = reducer.traffic.link
    if link is not None and link.beta_s > 0.0:
        found["link_bytes_per_s"] = 1.0 / link.beta_s
    if link is not None and link.alpha_s > 0.0:
        found["link_latency_s"] = link.alpha_s
    return {f"gradwire/{name}": float(value) for name, value in found.items()}


def _dense_bytes(reducer: InstalledRecipe) -> float:
    world = reducer.comm.world
    return sum(Round("all_reduce", each.numel, each.dtype).wire_bytes(world) for each in reducer.specs)


def _costs(history: History, dense_bytes: float) -> dict[str, float]:
    last = history.last
    if last is None:
        return {}
    found: dict[str, float] = {}
    for name, field in BOTH.items():
        found |= {name: getattr(last, field), f"{name}_mean": history.mean(field)}
    if len(by_rank_s := history.computing_by_rank_s()) > 1:
        slowest_s = max(by_rank_s)
        found |= {"slowest_rank": by_rank_s.index(slowest_s), "slowest_computing_s": slowest_s}
        found["median_computing_s"] = median(by_rank_s)
    found["dense_bytes"] = dense_bytes
    if dense_bytes > 0.0:
        found["ratio"] = found["bytes_sent"] / dense_bytes
        found["ratio_mean"] = found["bytes_sent_mean"] / dense_bytes
    return found


def _share_of_linear(reducer: InstalledRecipe, history: History) -> float | None:
    """Computing as a share of the whole step, by means.

    Encoding on the cores that compute makes the backward pass slower. If an adaptive recipe has measured that
    pass alone, the shorter of the two counts.
    """
    step_s, backward_s = history.mean("step_s"), history.mean("backward_s")
    if step_s <= 0.0:
        return None
    alone_s = backward_s if reducer.facts is None else min(backward_s, reducer.facts.backward_s)
    return (history.mean("before_s") + alone_s) / step_s


def _residual_to_gradient(reducer: InstalledRecipe, source: Source, loss_scale: float) -> float | None:
    """‖unsent gradient of this rank‖ / ‖mean gradient‖, where gradients of `source` are divided by
    `loss_scale`; `None` if there is no gradient.
    """
    grads = [each.grad for each in source.parameters.values() if each.grad is not None]
    gradient = _norm(grads) / loss_scale
    if not gradient > 0.0 or not math.isfinite(gradient):
        return None
    left = [
        flat_buffer.memory.weight * _norm([flat_buffer.committed[UNSENT]])
        for flat_buffer in _remembering(reducer)
    ]
    shard = reducer.shard
    # Shards of one size stand for the whole, where gradients are whole.
    parts = 1 if shard is None or source.members is not None else shard.parts
    return math.sqrt(parts) * math.hypot(*left) / gradient


def _remembering(reducer: InstalledRecipe) -> list[FlatBuffer]:
    return [flat_buffer for flat_buffer in reducer.layout.flat_buffers if UNSENT in flat_buffer.committed]


def _norm(tensors: list[Tensor]) -> float:
    """Norm in float64: memories may reach 2^112, whose square overflows a float32."""
    return math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in tensors))
