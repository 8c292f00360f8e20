"""An exchange tried on a few numbers before it counts, so that its kernels are there when it does.

Numba compiles a kernel when it is first called: for seconds, with the interpreter's lock held, on a machine
that has never done so, and loads it from a cache afterwards. Which kernels an exchange calls, only it knows.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch

from gradwire.comm import Comm, run_ranks
from gradwire.ddp.layout import Layout
from gradwire.exchange import Exchange, run
from gradwire.exchange.late import late_moment, step_that_sends
from gradwire.memory import UNSENT, Gradients
from gradwire.moment import Kept

_LOG = logging.getLogger("gradwire")

NUMEL = 1 << 12
"""Elements: enough for a choice of one in a thousand."""
RANKS = 4
"""At most: what some exchanges decode there is laid out as it is among more, and otherwise among fewer."""
STEPS = 4
"""Every rank has its turn wherever they take turns, and what alternates does."""


def rehearse_lanes(layout: Layout, world: int) -> None:
    """`rehearse` what runs in every lane. Raises nothing: kernels would only be compiled later."""
    for exchange in {id(lane.exchange): lane.exchange for lane in layout.lanes}.values():
        try:
            rehearse(exchange, world)
        except Exception as error:
            _LOG.warning("%r could not be rehearsed: %r", exchange, error)


def rehearse(exchange: Exchange, world: int) -> None:
    """Some steps of `exchange` behind its warm-up, with its memory, on ranks that are threads.

    Raises what the exchange raises.

    >>> from gradwire.recipes import recipe
    >>> rehearse(recipe("topk(ratio=0.01)").build().exchange, world=4)
    """
    ranks = min(world, RANKS)
    first = step_that_sends(exchange, NUMEL, ranks)
    run_ranks(ranks, partial(_play, exchange, range(first, first + STEPS)))


def _play(exchange: Exchange, steps: range, comm: Comm) -> None:
    memory, kept = exchange.memory, Kept()
    planes = () if memory is None else memory.planes
    committed = {name: torch.zeros(NUMEL) for name in planes}
    working = {name: torch.zeros(NUMEL) for name in dict.fromkeys((UNSENT, *planes))}
    random = torch.randn(NUMEL, generator=torch.Generator().manual_seed(comm.rank))
    for step in steps:
        # Where all elements are equal, as many reach a threshold: more than a bound allows, if there is one.
        gradient = torch.ones(NUMEL) if step == steps[-1] else random
        x = working[UNSENT]
        if memory is None:
            x.copy_(gradient)
        else:
            memory.fold(working, committed, Gradients.of(gradient), step, comm.world)
        at = replace(late_moment(NUMEL, comm.world, step, kept), rank=comm.rank, unsent=committed.get(UNSENT))
        run(exchange, x, torch.empty(NUMEL), comm, at)
        kept.commit()
        if memory is not None:
            memory.settle(working, committed)
