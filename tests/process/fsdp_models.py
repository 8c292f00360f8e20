"""Models under FSDP2's own traffic, and loops that train them, for scenes of it and for faults."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.errors import RanksDisagree
from tests.support.models import SHAPE, batch
from tests.support.ranks import FOLDER

WIDTH = 65
"""Rows do not come out even on two ranks, nor on four."""

NODES = {
    "in a row": [[0, 1], [2, 3]],
    "apart": [[0, 2], [1, 3]],
    "crossed": [[0, 3], [1, 2]],
}
"""Two nodes of two, by how ranks are numbered."""

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Layered(nn.Module):
    """Two blocks of their own, and a root that holds the rest."""

    def __init__(self, again: bool | None = None, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(SHAPE[0], WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(blocks)
        )
        self.last = nn.Linear(WIDTH, SHAPE[-1])
        self.side = nn.Linear(WIDTH, WIDTH)
        self.uses_side = True
        self._again = again

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for block in self.blocks:
            if self._again is None:
                hidden = hidden + torch.tanh(block(hidden))
            else:
                hidden = hidden + torch.tanh(checkpoint(block, hidden, use_reentrant=self._again))
        if self.uses_side:
            hidden = hidden + self.side(hidden)
        out: Tensor = self.last(hidden)
        return out


class Tied(nn.Module):
    """An embedding whose weight is the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.letters((inputs.abs() * 3).long().clamp(max=10)).mean(1)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)[:, : SHAPE[-1]]


def mesh() -> DeviceMesh:
    """All ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(
    make: Callable[[], nn.Module] = Layered,
    seed: int = 0,
    over: DeviceMesh | None = None,
    compiled: bool = False,
    frozen: Sequence[str] = (),
    groups: bool = False,
    **how: Any,
) -> Any:
    """What `make` makes, under `fully_shard`: the same parameters on all ranks, before they are sharded.

    With `groups`, two modules of the root are a list to `fully_shard`, and scatters have a process group of
    their own.
    """
    torch.manual_seed(seed)
    model: Any = make()
    over = mesh() if over is None else over
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(each) for each in frozen))
    for block in model.blocks:
        if compiled:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=over, **how)
    if groups:
        fully_shard([model.side, model.last], mesh=over, **how)
    fully_shard(model, mesh=over, **how)
    if groups:
        model.set_separate_reduce_scatter_group()
    return model


def adam(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **how)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs).float(), targets)


def reshard(model: nn.Module) -> None:
    """After a forward pass without gradients the root stays gathered."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def whole(model: nn.Module) -> Tensor:
    """The masters of all ranks, in a row."""
    reshard(model)
    return torch.cat([whole_of(each).reshape(-1) for each in model.parameters()])


def whole_of(tensor: Any) -> Tensor:
    """In float64."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().double()


def bits(values: Tensor) -> str:
    """A fingerprint of all of them."""
    return hashlib.blake2b(values.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def prints(state: Any) -> Any:
    """A state with fingerprints in place of its tensors."""
    if isinstance(state, dict):
        return {name: prints(each) for name, each in state.items()}
    return f"{state.dtype} {tuple(state.shape)} {bits(state)}" if isinstance(state, Tensor) else state


def all_of(state: Any) -> list[Any]:
    """Those of all ranks."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def kinds(wire: gradwire.Wire, what: str) -> list[str]:
    """What modules have sent, as their report says."""
    return sorted({kind for each in wire.report().as_dict()["modules"] for kind in each[what]})


def refusal(attempt: Callable[[], Any], *others: type[Exception]) -> str:
    """What it raises, if it is refused."""
    try:
        attempt()
    except (ValueError, RanksDisagree, *others) as error:
        return str(error)
    return ""


# -- loops


Loop = Callable[[Any, torch.optim.Optimizer], list[float]]
"""Trains a model, and returns its losses."""
Make = Callable[[nn.Module], torch.optim.Optimizer]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: float | None = None
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return train(model, optimizer, range(6))


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return train(model, optimizer, range(6), clip=0.1)


def accumulated(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Two micro-batches a step, the first of which sends no gradient."""
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        loss_of(model, 2 * step).backward()
        model.set_requires_gradient_sync(True)
        loss = loss_of(model, 2 * step + 1)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def sent_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Two micro-batches a step, both of which are scattered."""
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            loss = loss_of(model, 2 * step + part)
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def branching(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """A part of the root gets no gradient in every other step."""
    losses = []
    for step in range(6):
        model.uses_side = step % 2 == 0
        losses += train(model, optimizer, range(step, step + 1))
    return losses


def prefetched(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Every module gathers the next one before it is needed."""
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for one, other in pairwise(modules):
        one.set_modules_to_forward_prefetch([other])
    return train(model, optimizer, range(6))


def evaluated(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Evaluations between backward and step, and after it, also within `exact()` of the model's wire."""
    losses, wire = [], getattr(model, "wire", None)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            losses.append(float(loss_of(model, 50 + step)))
        optimizer.step()
        with wire.exact() if wire else nullcontext(), torch.no_grad():
            losses.append(float(loss_of(model, 60 + step)))
    return losses


LOOPS = {each.__name__: each for each in (clipped, accumulated, sent_twice, branching, prefetched)}


def move(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Move masters, in a way that torch may not count; returns losses of steps on the way."""
    losses: list[float] = []
    half = {name: 0.5 * each.detach() for name, each in model.state_dict().items()}
    is_here = how != "on one rank" or dist.get_rank() == 0
    reshard(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if how == ".data":
                parameter.data.mul_(1.5)
            elif how in ("_local_tensor", "on one rank") and is_here:
                parameter._local_tensor.mul_(1.5)  # type: ignore[attr-defined]
            elif how == "average":
                parameter.copy_(half[name])
    if how == "load_state_dict":
        model.load_state_dict(half)
    elif how == "dcp":
        folder = Path(os.environ[FOLDER], "moved")
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
        losses = train(model, optimizer, range(2, 4))
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    return losses


def in_backward(model: nn.Module) -> torch.optim.Optimizer:
    """Each parameter has an optimizer, which steps in the backward pass as soon as its gradient is there."""
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.05)

        def step(_parameter: Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return torch.optim.SGD(model.parameters(), lr=0.0)  # finds no gradients


# -- runs


@dataclass(frozen=True)
class Stock:
    """A run of stock FSDP2."""

    losses: list[float]
    masters: str


@dataclass(frozen=True)
class Carried(Stock):
    """A run under a wire, and what the wire tells of it."""

    step: int
    gathered: list[str]
    scattered: list[str]
    gather_bytes: float
    scatter_bytes: float
    dense_bytes: float
    told_bytes: list[float]
    """By metrics: of both, of gathers, of scatters."""
    modules: int
    numel: int
    memory_bytes: int
    held_bytes: int
    text: str


def stock(loop: Loop = plain, optimizer: Make = adam, **how: Any) -> Stock:
    """Of a model that is sharded in this way."""
    model = sharded(**how)
    losses = loop(model, optimizer(model))
    return Stock(losses, bits(whole(model)))


def carried(
    recipe: str,
    gather: Any,
    loop: Loop = plain,
    optimizer: Make = adam,
    nodes: Any = "auto",
    guard_every: int = 0,
    **how: Any,
) -> Carried:
    """The same with scatters by this recipe. The loop finds the wire at its model."""
    model = sharded(**how)
    steps = optimizer(model)
    wire = gradwire.attach(model, steps, recipe, gather=gather, nodes=nodes, guard_every=guard_every)
    model.wire = wire
    losses, told, metrics = loop(model, steps), wire.report().as_dict(), wire.metrics()
    return Carried(
        losses,
        bits(whole(model)),
        told["step"],
        kinds(wire, "gathered"),
        kinds(wire, "scattered"),
        told["gather_bytes_per_step"],
        told["scatter_bytes_per_step"],
        told["dense_bytes_per_step"],
        [metrics[f"gradwire/{name}_mean"] for name in ("bytes_sent", "gather_bytes", "scatter_bytes")],
        len(told["modules"]),
        sum(each.numel() for each in model.parameters() if each.requires_grad),
        told["memory_bytes"],
        told["held_bytes"],
        str(wire.report()),
    )
