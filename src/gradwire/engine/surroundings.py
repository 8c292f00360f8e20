"""What an engine needs from outside: the comms, the model's optimizer and buffers, and where to report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.arena import Lane, Unit
from gradwire.comm import Comm
from gradwire.engine.layout import Layout, Policy
from gradwire.engine.runner import Post
from gradwire.engine.step import Passenger, Step
from gradwire.moment import Moment, Replicas
from gradwire.planning.costs import Link

Inspect: TypeAlias = Callable[[Lane, Unit, Tensor, Moment], None]


@dataclass(frozen=True)
class Surroundings:
    """Built before the engine and passed to its constructor. The functions are called on the engine's thread.

    Gradients travel over `comm`. The verdict, and all else that ranks agree on, travels over `control` in
    tensors on the CPU; the two may be the same comm, and must be over the same ranks. `device` is where the
    gradients and the memory are. `post` runs a function on the engine's thread.

    `alone` is for a single rank, which has nothing to send: it compresses nothing (`uncompressed`).
    """

    comm: Comm
    control: Comm
    post: Post
    concluded: Callable[[Step], None] = lambda _step: None
    """Called once per step, with its outcome."""
    policy: Policy | None = None
    seed: int = 0
    memory_dtype: torch.dtype | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable
    alone: bool = False
    loss_scale: Callable[[], float] = lambda: 1.0
    replicas: Replicas = lambda _name: None
    """What all ranks hold alike of a parameter and of its optimizer."""
    uses: Callable[[], Mapping[str, float]] = dict
    """Multiply-adds per weight, by parameter name, as far as they have been counted."""
    buffers: Callable[[], Passenger | None] = lambda: None
    """What the current step carries of the model's buffers."""
    check: Callable[[Layout], None] = lambda _layout: None
    """Raises `ValueError` for a layout that does not suit the optimizer."""
    prepare: Callable[[Layout], None] = lambda _layout: None
    """Compiles the kernels of a layout that will run."""
    link_seen: Callable[[Link | None], None] = lambda _link: None
    """Hears after each step what the link is taken to be."""
    inspect: Inspect = lambda _lane, _unit, _x, _at: None
    """Sees every unit before its exchange."""
