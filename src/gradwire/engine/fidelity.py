"""Measures how much of recorded gradients a recipe delivers, with its exchange and memory, in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.arena import Lane, ParameterSpec
from gradwire.comm import Comm, run_ranks
from gradwire.exchange.base import run
from gradwire.exchange.compose import forget
from gradwire.measure.observed import Observed
from gradwire.memory import UNSENT, Gradients
from gradwire.moment import Moment
from gradwire.recipes import Composition

Recorded = Sequence[Sequence[Tensor]]
"""Gradients by step and rank, each (numel,): all parameters in layout order."""


class Interrupted(Exception):
    """The result is not needed any more."""


def fidelity(
    composition: Composition,
    specs: Sequence[ParameterSpec],
    recorded: Recorded,
    *,
    first_step: int = 0,
    is_over: Callable[[], bool] = lambda: False,
) -> float:
    """1 − ‖Σ carried − Σ averages‖ / ‖Σ averages‖, sums over all recorded steps; at least 0.

    Gradient that a memory keeps in one step counts as delivered if a later step sends it. 1.0 for gradients
    that are zero. Raises `Interrupted` soon after `is_over()` is true.
    """
    means, _sent_bytes = carried(composition, specs, recorded, first_step=first_step, is_over=is_over)
    return max(1.0 - relative_error(sum_of(means), sum_of([average(step) for step in recorded])), 0.0)


def carried(
    composition: Composition,
    specs: Sequence[ParameterSpec],
    recorded: Recorded,
    *,
    first_step: int = 0,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[list[Tensor], float]:
    """The means (numel,) that `composition` makes of every step, and the bytes that a rank sends in all."""

    def rank(comm: Comm) -> tuple[list[Tensor], float]:
        lane, metered, means = _lane(composition, specs, comm.world), Observed(comm), []
        for number, gradients in enumerate(recorded):
            if is_over():
                raise Interrupted
            means.append(_step(lane, gradients[comm.rank], first_step + number, metered))
        return means, metered.wire_bytes

    return run_ranks(len(recorded[0]), rank)[0]


def average(gradients: Sequence[Tensor]) -> Tensor:
    """The mean over ranks, float64."""
    return sum_of(gradients) / len(gradients)


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Their sum, float64."""
    return torch.stack([each.double() for each in tensors]).sum(0)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖; 0 where both are zero."""
    off, norm = float((found.double() - wanted).norm()), float(wanted.double().norm())
    return off / norm if norm > 0.0 else float(off > 0.0)


def _lane(composition: Composition, specs: Sequence[ParameterSpec], world: int) -> Lane:
    exchange = composition.exchange
    if exchange.memory is None:
        exchange = forget(exchange)
    cuts = replace(composition, exchange=exchange).cuts(specs, world)
    return Lane(0, specs, exchange, cuts, torch.device("cpu"))


def _step(lane: Lane, gradient: Tensor, step: int, comm: Observed) -> Tensor:
    mean = torch.zeros_like(lane.x)
    lane.fold(Gradients(gradient, lane.pieces), step, comm.world)
    for unit in lane.units:
        here = slice(unit.start, unit.stop)
        at = Moment(
            step,
            unit.index,
            comm.rank,
            comm.world,
            parts=unit.parts,
            narrow=lane.narrow,
            unsent=lane.committed[UNSENT][here] if UNSENT in lane.committed else None,
            kept=lane.kept,
        )
        if lane.exchange.rounds(unit.numel, lane.dtype, at):
            run(lane.exchange, lane.x[here], mean[here], comm, at)
    lane.commit(())
    return mean
