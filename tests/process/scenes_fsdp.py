"""Scenes of FSDP2's own traffic: what its gathers and scatters bring, send and remember."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.comm.groups import lent
from gradwire.errors import PeerFailed, RanksDisagree
from gradwire.recipes import recipe as parsed
from gradwire.sources.fsdp.coding import scattering
from gradwire.sources.fsdp.modules import ShardedModule
from gradwire.sources.fsdp.traffic import Traffic
from tests.support.models import SHAPE, batch
from tests.support.ranks import FOLDER

WIDTH = 65
"""Rows do not come out even on two ranks, nor on four."""


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


class Columns(nn.Module):
    """Parameters that come out even in both dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(SHAPE[0], 64), nn.Linear(64, 64)])
        self.last = nn.Linear(64, SHAPE[-1])

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return self.last(inputs)


def mesh() -> DeviceMesh:
    """All ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(
    make: Callable[[], nn.Module] = Layered,
    seed: int = 0,
    over: DeviceMesh | None = None,
    compiled: bool = False,
    frozen: Sequence[str] = (),
    **how: Any,
) -> nn.Module:
    """The same parameters on all ranks, before they are sharded."""
    torch.manual_seed(seed)
    model, over = make(), mesh() if over is None else over
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(each) for each in frozen))
    for block in model.blocks:  # type: ignore[union-attr]  # a list of modules
        if compiled:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=over, **how)
    return fully_shard(model, mesh=over, **how)


def adam(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **how)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs).float(), targets)


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


def reshard(model: nn.Module) -> None:
    """After a forward pass without gradients the root stays gathered."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def whole(model: nn.Module) -> Tensor:
    """The masters of all ranks, in a row."""
    reshard(model)
    parameters = (each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters())
    return torch.cat([each.detach().reshape(-1).double() for each in parameters])


def alike(values: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    others = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(others, values)
    return all(torch.equal(values, other) for other in others)


def off(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between the masters of two models."""
    return float((whole(one) - whole(other)).abs().max())


def kinds(wire: gradwire.Wire, what: str) -> list[str]:
    """What modules have sent, as their report says."""
    return sorted({kind for each in wire.report().as_dict()["modules"] for kind in each[what]})


def beside_stock(
    recipe: str, gather: Any = None, loop: str = "plain", nodes: Any = "auto", **how: Any
) -> dict[str, Any]:
    """The masters and losses of a wire beside those of stock FSDP2."""
    found, losses = [], []
    for ours in (True, False):
        model = sharded(**how)
        optimizer = adam(model)
        if ours:
            wire = gradwire.attach(model, optimizer, recipe, gather=gather, nodes=nodes)
        losses.append(LOOPS[loop](model, optimizer))
        found.append(model)
        if ours:
            report, metrics = wire.report(), wire.metrics()
    numel = sum(each.numel() for each in found[0].parameters() if each.requires_grad)
    return {
        "off": off(*found),
        "alike": alike(whole(found[0])),
        "losses": losses,
        "step": report.step,
        "sent": [kinds(wire, "gathered"), kinds(wire, "scattered")],
        "bytes": [report.as_dict()["gather_bytes_per_step"], report.as_dict()["scatter_bytes_per_step"]],
        "ring": report.dense_bytes_per_step,
        "numel": numel,
        "memory": report.memory_bytes,
        "told": [
            metrics[f"gradwire/{name}_mean"] for name in ("bytes_sent", "gather_bytes", "scatter_bytes")
        ],
        "text": str(report),
    }


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return train(model, optimizer, range(6))


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return train(model, optimizer, range(6), clip=0.1)


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Two micro-batches a step, the first of which sends no gradient."""
    losses = []
    assert isinstance(model, FSDPModule)
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


def branching(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """A part of the root gets no gradient in every other step."""
    losses = []
    for step in range(6):
        model.uses_side = step % 2 == 0  # type: ignore[assignment]
        losses += train(model, optimizer, range(step, step + 1))
    return losses


def divided(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """FSDP2 divides by another number than the world."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(3.0)
            each.set_force_sum_reduction_for_comms(True)  # stock FSDP2 over gloo needs it for any factor
    return train(model, optimizer, range(6))


def prefetched(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Every module gathers the next one before it is needed."""
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for one, other in pairwise(modules):
        one.set_modules_to_forward_prefetch([other])
    return train(model, optimizer, range(6))


def normed(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The norms of gradients, and not the losses."""
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(float(whole_of(norm)))
        optimizer.step()
    return norms


def copied() -> dict[str, Any]:
    """Deep copies with a wire and without, which torch refuses; and a step of a shallow one."""
    found: dict[str, Any] = {"deep": []}
    losses = []
    for ours in (True, False):
        model = sharded()
        optimizer = adam(model)
        wire = gradwire.attach(model, optimizer, "dense") if ours else None
        train(model, optimizer, range(2))
        for way in (copy.deepcopy, pickle.dumps):
            found["deep"].append(_refusal(partial(way, model), AssertionError, pickle.PicklingError))
        shallow = copy.copy(model)  # has the same parameters, and torch gathers and scatters the same
        losses.append(train(shallow, optimizer, range(2, 4)) + train(model, optimizer, range(4, 6)))
        if wire is not None:
            found["step"] = wire.report().step
    return {**found, "same": losses[0] == losses[1]}


def thawed() -> dict[str, str]:
    """A parameter is frozen after attach: what is unsent fits no more; without memory that is nothing."""
    found = {}
    for recipe in ("int8", "int4"):
        model = sharded()
        optimizer = adam(model)
        gradwire.attach(model, optimizer, recipe)
        train(model, optimizer, range(1))
        model.first.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
        found[recipe] = _refusal(partial(train, model, optimizer, range(1, 2)))
    return found


def in_turn() -> dict[str, Any]:
    """Two adapters in turn: one trains, the other is thawed in its place, and back; a reference between."""

    def turn(model: nn.Module, first: bool) -> None:
        for block, is_it in zip(model.blocks, (first, not first), strict=True):  # type: ignore[arg-type]
            block[0].weight.requires_grad_(is_it)

    def calls() -> int:
        return sum(
            count
            for each in wire.report().as_dict()["modules"]
            for what in ("gathered", "scattered")
            for count in each[what].values()
        )

    found: dict[str, Any] = {}
    model = sharded(frozen=("first", "last", "side"))
    turn(model, first=True)
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, "int4")
    train(model, optimizer, range(2))
    turn(model, first=False)
    with torch.no_grad():
        loss_of(model, 2)
    reshard(model)
    before = calls()
    found["said"] = _refusal(lambda: loss_of(model, 2))
    found["sent"] = calls() - before
    turn(model, first=True)
    train(model, optimizer, range(2, 4))
    found["step"] = wire.report().step
    return found


def evaluated(recipe: str) -> dict[str, Any]:
    """Evaluations between steps, also between backward and step, beside none."""
    found = []
    for looks in (False, True):
        model = sharded()
        optimizer = adam(model)
        wire = gradwire.attach(model, optimizer, recipe, gather="int8")
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if looks:
                with torch.no_grad():
                    loss_of(model, 50 + step)
            optimizer.step()
            if looks:
                with wire.exact(), torch.no_grad():
                    loss_of(model, 60 + step)
        found.append(whole(model))
    return {"same": torch.equal(*found), "step": wire.report().step}


LOOPS = {
    each.__name__: each
    for each in (plain, clipped, accumulated, sent_twice, branching, divided, prefetched, normed)
}


def _refusal(attempt: Callable[[], Any], *others: type[Exception]) -> str:
    try:
        attempt()
    except (ValueError, RanksDisagree, *others) as error:
        return str(error)
    return ""


def refused() -> dict[str, str]:
    """Each in its words."""
    world = dist.get_world_size()
    grid = init_device_mesh("cpu", (1, world), mesh_dim_names=("nodes", "ranks"))
    part = Layered()
    fully_shard(part.blocks[0], mesh=mesh())
    allocating = sharded()
    assert isinstance(allocating, FSDPModule)
    allocating.set_allocate_memory_from_process_group_for_comm(True)
    twice = sharded()
    gradwire.attach(twice, None, "dense")
    mixed = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()), mesh=mesh())
    ignored = Layered()
    fully_shard(ignored, mesh=mesh(), ignored_params={ignored.last.weight})
    elsewhere = adam(Layered())
    rank = dist.get_rank()

    def trial(model: nn.Module, *arguments: Any, **options: Any) -> str:
        return _refusal(lambda: gradwire.attach(model, *arguments, **options))

    return {
        "auto": trial(sharded()),
        "topk": trial(sharded(), None, "topk"),
        "collective": trial(sharded(), None, "int8(collective='all_gather')"),
        "grid": trial(sharded(over=grid), None, "dense"),
        "part": trial(part, None, "dense"),
        "allocating": trial(allocating, None, "dense"),
        "twice": trial(twice, None, "dense"),
        "mixed": trial(mixed, None, "dense", gather="int8"),
        "mixed, as it is": trial(mixed, None, "dense"),
        "ignored": trial(ignored, None, "dense"),
        "gather": trial(sharded(), None, "dense", gather="int4"),
        "inside": trial(sharded(), None, "dense", inside="int8"),
        "policy": trial(sharded(), None, "int8", policy={"*": "dense"}),
        "checksums": trial(sharded(), None, "int8", checksums=True),
        "process group": trial(sharded(), None, "int8", process_group=dist.group.WORLD),
        "optimizer": trial(sharded(), elsewhere, "int8"),
        "nodes": trial(sharded(), None, "int8", nodes=[[0], list(range(1, world))]),
        "ranks": trial(sharded(), None, "int8" if rank else "int4"),
        "seed": trial(sharded(), None, "int8", seed=rank),
        "on one rank": trial(sharded(), None, "int8" if rank else "topk"),
        "plain module": trial(Layered(), None, "int8", replicas=dist.group.WORLD, gather="int8"),
    }


# -- gathers


def seen(model: nn.Module) -> list[Tensor]:
    """A list that fills with the first block's weight, in each of its forward passes and before its
    backward."""
    linear, found = model.blocks[0][0], list[Tensor]()  # type: ignore[index,union-attr]

    def note(module: nn.Module, *_: Any) -> None:
        found.append(module.weight.detach().clone())  # type: ignore[operator,union-attr]

    linear.register_forward_pre_hook(note)
    linear.register_full_backward_pre_hook(note)
    return found


def rounding(gathered: Tensor, master: Tensor) -> float:
    """The largest error of a gathered weight, in halves of the distance of two codes of its largest value."""
    return float((gathered.double() - master.double()).abs().max() / (master.double().abs().max() / 254))


def master_of(model: nn.Module) -> Tensor:
    reshard(model)
    weight = model.blocks[0][0].weight  # type: ignore[index,union-attr]
    found: Tensor = weight.full_tensor().detach()
    return found


def gathers(gather: Any, again: bool | None = None, **how: Any) -> dict[str, Any]:
    """The weight that a block computes with: on all ranks, in forward, recomputation and backward."""
    model = sharded(partial(Layered, again=again), **how)
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, "dense", gather=gather)
    values, master = seen(model), master_of(model)
    exact = master.to(torch.bfloat16).float()
    log, logger = BufferingHandler(100), logging.getLogger("gradwire")
    logger.addHandler(log)
    level = logger.level
    logger.setLevel(logging.INFO)
    loss_of(model, 0).backward()
    logger.setLevel(level)
    logger.removeHandler(log)
    one, two = (
        wire.report().as_dict()["gather_bytes_per_step"],
        wire.report().as_dict()["scatter_bytes_per_step"],
    )
    return {
        "times": len(values),
        "alike": all(alike(each.double()) for each in values),
        "same": all(torch.equal(each, values[0]) for each in values),
        "rounding": rounding(values[0], master),
        "bf16": torch.equal(values[0].float(), exact),
        "as it is": torch.equal(values[0], master),
        "kinds": kinds(wire, "gathered"),
        "said": [f"{each.levelname}: {each.getMessage()}" for each in log.buffer],
        "share": one / two,
        "masters": torch.equal(master_of(model), master),
    }


def moved_by(how: str) -> dict[str, Any]:
    """A gather sends what masters are now, whatever has moved them, and whatever torch has counted of it."""
    model = sharded()
    optimizer = adam(model, **OPTIMIZERS.get(how, {}))
    within: list[torch.optim.Optimizer] = []
    if how == "in backward":
        for parameter in model.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)
            within.append(own)

            def step(_parameter: Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    wire = gradwire.attach(model, None if within else optimizer, "dense", gather="int8")
    values, before = seen(model), master_of(model).clone()
    train(model, optimizer, range(2))
    saved = copy.deepcopy({name: each.detach().clone() for name, each in model.state_dict().items()})
    average = {name: 0.5 * each for name, each in saved.items()}
    folder = Path(os.environ[FOLDER], "moved")
    reshard(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if how == ".data":
                parameter.data.mul_(1.5)
            elif how == "_local_tensor":
                parameter._local_tensor.mul_(1.5)  # type: ignore[attr-defined]
            elif how == "average":
                parameter.copy_(average[name])
    if how == "load_state_dict":
        model.load_state_dict(average)
    elif how == "dcp":
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
        train(model, optimizer, range(2, 4))
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    now = master_of(model).clone()
    values.clear()
    model.eval()
    with torch.no_grad():
        loss_of(model, 9)
    reshard(model)
    return {
        "moved": float((now - before).abs().max()) > 0,
        "rounding": rounding(values[0], now),
        "is rounded": not torch.equal(values[0], now),
        "alike": alike(values[0].double()),
        "kinds": kinds(wire, "gathered"),
    }


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
MOVED = (*OPTIMIZERS, ".data", "_local_tensor", "load_state_dict", "dcp", "average", "in backward")


def exactly() -> dict[str, Any]:
    """Within `exact()` weights are the masters, though the root was left gathered; after it they are not."""
    model = sharded()
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, "dense", gather="int8")
    train(model, optimizer, range(1))
    values, master, found = seen(model), master_of(model), []
    root: list[Tensor] = []
    model.first.register_forward_pre_hook(lambda module, _: root.append(module.weight.detach().clone()))  # type: ignore[union-attr]
    for scope in (nullcontext, wire.exact, nullcontext):  # type: ignore[attr-defined]
        with scope(), torch.no_grad():
            loss_of(model, 1)
        found.append(torch.equal(values[-1], master))
    reshard(model)
    first = model.first.weight.full_tensor()  # type: ignore[union-attr,operator]
    return {
        "block": found,
        "root": [torch.equal(each, first) for each in root],
        "kinds": kinds(wire, "gathered"),
    }


def exactly_though_asked_before() -> dict[str, Any]:
    """A gather that is on its way when `exact()` begins, or ends, is none of what follows."""
    model = sharded()
    wire = gradwire.attach(model, adam(model), "dense", gather="int8")
    train(model, adam(model), range(1))
    values, master, block = seen(model), master_of(model), model.blocks[0]  # type: ignore[index]
    assert isinstance(block, FSDPModule)
    block.unshard(async_op=True)
    with wire.exact(), torch.no_grad():
        loss_of(model, 1)
        block.reshard()
        block.unshard(async_op=True)
    with torch.no_grad():
        loss_of(model, 1)
    return {"exact": [torch.equal(each, master) for each in values]}


def grouped(recipe: str, gather: Any) -> dict[str, Any]:
    """`fully_shard` of a list of modules, with a process group of their own for scatters."""
    found, losses, told = [], [], []
    for ours in (True, False):
        torch.manual_seed(0)
        model, over = Layered(), mesh()
        fully_shard([model.side, model.last], mesh=over)
        for block in model.blocks:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
        assert isinstance(model, FSDPModule)
        model.set_separate_reduce_scatter_group()
        optimizer = adam(model)
        wire = gradwire.attach(model, optimizer, recipe, gather=gather) if ours else None
        losses.append(train(model, optimizer, range(5)))
        found.append(whole(model))
        if wire is not None:
            told = [
                kinds(wire, "gathered"),
                kinds(wire, "scattered"),
                len(wire.report().as_dict()["modules"]),
            ]
    return {
        "off": float((found[0] - found[1]).abs().max()),
        "losses": losses,
        "kinds": told,
        "alike": alike(found[0]),
    }


# -- scatters


class Vector(nn.Module):
    """A sum of products: its gradient is what it is given."""

    def __init__(self, rows: int = 7, columns: int = 50) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.weight = nn.Parameter(torch.ones(rows, columns))
        self.more = nn.Parameter(torch.ones(columns))

    def forward(self, inputs: Tensor, more: Tensor) -> Tensor:
        return (self.weight * inputs).sum() + (self.more * more).sum()


def given(step: int, rank: int | None = None, rows: int = 7, columns: int = 50) -> tuple[Tensor, Tensor]:
    """The gradients of a step on a rank."""
    who = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + who)
    return torch.randn(rows, columns, generator=generator), torch.randn(columns, generator=generator)


def whole_of(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().double()


def summed(recipe: str, **options: Any) -> dict[str, Any]:
    """How far the gradient is from the mean of what ranks were given, and what is remembered, in a step."""
    model = sharded(Vector)
    wire = gradwire.attach(model, None, recipe, **options)
    world = dist.get_world_size()
    model(*given(0)).backward()
    means = [sum(given(0, rank)[place].double() for rank in range(world)) / world for place in range(2)]
    grads = [whole_of(model.weight.grad), whole_of(model.more.grad)]  # type: ignore[union-attr]
    return {
        "off": max(
            float((grad - mean).norm() / mean.norm()) for grad, mean in zip(grads, means, strict=True)
        ),
        "bytes": wire.report().as_dict()["scatter_bytes_per_step"],
        "ring": wire.report().dense_bytes_per_step,
        "memory": wire.report().memory_bytes,
        "kinds": kinds(wire, "scattered"),
    }


def unsent_of(wire: gradwire.Wire) -> dict[str, Tensor]:
    """The sum over ranks of what is unsent."""
    [state] = wire.state_dict().values()
    memory: dict[str, Tensor] = state["memory"]
    for each in memory.values():
        dist.all_reduce(each)
    return memory


def vector(
    recipe: str = "int4", lr: float = 0.0, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model whose gradients are given, its optimizer and its wire."""
    model = sharded(Vector, seed=options.pop("model_seed", 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, gradwire.attach(model, optimizer, recipe, **options)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole mean gradients."""
    reshard(model)
    return {name: whole_of(each.grad) for name, each in model.named_parameters()}


def total(steps: Sequence[int], factor: float = 1.0) -> dict[str, Tensor]:
    """The sum over ranks and steps of what was given."""
    ranks = range(dist.get_world_size())
    both = [[factor * each.double() for each in given(step, rank)] for step in steps for rank in ranks]
    return {name: sum(each[place] for each in both) for place, name in enumerate(("weight", "more"))}  # type: ignore[misc]


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, in parts of the largest number."""
    largest = max(float(each.abs().max()) for each in other.values())
    return max(float((one[name] - other[name]).abs().max()) for name in other) / largest


def conserved(recipe: str = "int4", parts: int = 1, **options: Any) -> dict[str, Any]:
    """What has arrived, and what is unsent, beside all that was given; `parts` are scattered in each step."""
    model, optimizer, wire = vector(recipe, **options)
    world, arrived = dist.get_world_size(), {"weight": 0.0, "more": 0.0}
    for step in range(5):
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each micro-batch is compressed and sent
            for part in range(parts):
                model(*given(10 * step + part)).backward()
            optimizer.step()
        arrived = {name: arrived[name] + world * each for name, each in gradients(model).items()}
    unsent = unsent_of(wire)
    both = {name: arrived[name] + unsent[name] for name in unsent}
    steps = [10 * step + part for step in range(5) for part in range(parts)]
    return {
        "off": difference(both, total(steps)),
        "unsent": difference(
            unsent, {name: 0.0 * each for name, each in total(steps).items()} | total(steps)
        ),
        "step": wire.report().step,
        "memory": wire.report().memory_bytes,
        "kinds": kinds(wire, "scattered"),
    }


class TypedByHand(Vector):
    """A parameter between two others has gradients in bfloat16, so that torch 2.15 packs it after them."""

    def __init__(self) -> None:
        super().__init__()
        more = self.more
        del self.more
        self.between = nn.Parameter(torch.ones(3, 50))
        self.between.grad_dtype = torch.bfloat16
        self.more = more

    def forward(self, inputs: Tensor, more: Tensor) -> Tensor:
        return super().forward(inputs, more) + (self.between * inputs[:3].bfloat16()).sum()


def conserved_by_type() -> dict[str, Any]:
    """By name, how far what arrived and what is unsent are from all that was given, in parts of its largest
    number; and the order in which torch packs."""
    model = sharded(TypedByHand)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    wire = gradwire.attach(model, optimizer, "int4")
    world, arrived = dist.get_world_size(), dict.fromkeys(("weight", "between", "more"), 0.0)
    for step in range(5):
        optimizer.zero_grad()
        model(*given(step)).backward()
        optimizer.step()
        arrived = {name: arrived[name] + world * each for name, each in gradients(model).items()}
    unsent, wanted = unsent_of(wire), total(range(5))
    ranks = range(world)
    both = [given(step, rank)[0][:3].bfloat16() for step in range(5) for rank in ranks]
    wanted["between"] = torch.stack(both).double().sum(0)
    off = {name: float((arrived[name] + unsent[name] - each).abs().max()) for name, each in wanted.items()}
    [group] = [each.group for each in wire._traffic.modules]
    order = getattr(group, "_reduce_scatter_param_indices", [0, 1, 2])
    return {
        "off": {name: each / float(wanted[name].abs().max()) for name, each in off.items()},
        "waits": {name: bool(each.any()) for name, each in unsent.items()},
        "order": list(order),
    }


def unpacked_otherwise() -> str:
    """A torch that packs in another order than it says."""
    model = sharded(Vector)
    with patch.object(ShardedModule, "trained", lambda _self: (1, 0)):
        gradwire.attach(model, None, "int8")
        return _refusal(lambda: model(*given(0)).backward())


def unbiased() -> float:
    """The mean of 200 scatters without memory of one gradient: how many standard errors is it off at most?"""
    model, optimizer, _wire = vector("int4(feedback=False)")
    found = []
    for _ in range(200):
        optimizer.zero_grad()
        model(*given(0)).backward()
        found.append(gradients(model)["weight"])
    drawn = torch.stack(found)
    mean, error = drawn.mean(0), drawn.std(0) / len(drawn) ** 0.5
    world = dist.get_world_size()
    return float(((mean - total([0])["weight"] / world) / error.clamp(min=1e-6)).abs().max())


def waited() -> dict[str, Any]:
    """A module of which a parameter has no gradient in one step: what is unsent stays for the next."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wire = gradwire.attach(model, optimizer, "int4")
    train(model, optimizer, range(2))
    before = unsent_of(wire)
    model.uses_side = False  # type: ignore[assignment]
    train(model, optimizer, range(2, 3))
    after = unsent_of(wire)
    root = [name for name in before if not name.startswith("blocks")]
    return {
        "stays": all(torch.equal(before[name], after[name]) for name in root),
        "moves": any(not torch.equal(before[name], after[name]) for name in before if name not in root),
        "kinds": kinds(wire, "scattered"),
        "text": "without memory" in str(wire.report()),
    }


def left_out(how: str, *, resumes: bool = False, **options: Any) -> dict[str, Any]:
    """A step that no optimizer makes, in between, leaves no trace, even if the run `resumes` just before."""
    found = []
    for leaves_out in (False, True):
        scaler = (
            torch.amp.GradScaler("cpu", init_scale=64.0) if how in ("scaler", "nan in a scaler") else None
        )
        model, optimizer, wire = vector("int4", lr=0.05, scaler=scaler, **options)
        finite = True
        for step in (0, 1, -1, 2, 3):
            if step < 0 and not leaves_out:
                continue
            if step < 0 and resumes:
                masters, state = copy.deepcopy(model.state_dict()), wire.state_dict()
                model, optimizer, wire = vector("int4", lr=0.05, scaler=scaler, model_seed=5, **options)
                model.load_state_dict(masters)
                wire.load_state_dict(state)
            optimizer.zero_grad(set_to_none=how != "zeros")
            inputs = given(max(step, 7) if step < 0 else step)
            if step < 0 and "nan" in how and dist.get_rank() == 1:
                inputs[0][3, 3] = torch.nan
            loss = model(*inputs)
            if scaler is None:
                loss.backward()
                if step >= 0:
                    optimizer.step()
                elif how == "asked":
                    wire.drop_step()
            else:
                scaler.scale(loss * (torch.inf if step < 0 and how == "scaler" else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            if step < 0:
                nan = [bool(each.isnan().any()) for each in gradients(model).values()]
                [state] = wire.state_dict().values()
                finite = all(bool(each.isfinite().all()) for each in state["memory"].values())
        found.append((whole(model), unsent_of(wire), wire.report()))
    (masters, unsent, _), (others, theirs, report) = found
    return {
        "same": torch.equal(masters, others)
        and all(torch.equal(unsent[each], theirs[each]) for each in unsent),
        "step": report.step,
        "dropped": report.dropped_steps,
        "nan": nan,
        "finite": finite,
    }


def kept() -> dict[str, Any]:
    """Without the way back, memory is half as large, and no step can be left out."""
    _model, _optimizer, wire = vector("int4", skipped="keep")
    _model, _optimizer, other = vector("int4", memory_dtype=torch.bfloat16)
    return {
        "refused": _refusal(wire.drop_step),
        "memory": [wire.report().memory_bytes, other.report().memory_bytes],
        **{f"conserved, {key}": each for key, each in conserved(skipped="keep").items()},
    }


def resumed(recipe: str, **options: Any) -> dict[str, Any]:
    """With a break in the middle, and without."""
    found: list[Tensor] = []
    folder = Path(os.environ[FOLDER], f"resumed {recipe}")
    for way in ("not", "state", "folder"):
        model, optimizer, wire = vector(recipe, lr=0.05, gather="int8", **options)
        steps = list(range(6))
        for step in steps[:3]:
            optimizer.zero_grad()
            model(*given(step)).backward()
            optimizer.step()
        if way != "not":
            masters = copy.deepcopy(model.state_dict())
            state = wire.state_dict()
            wire.save(folder)
            before_bytes = wire.report().memory_bytes
            model, optimizer, wire = vector(recipe, lr=0.05, gather="int8", model_seed=5, **options)
            model.load_state_dict(masters)
            wire.load(folder) if way == "folder" else wire.load_state_dict(state)
            after_bytes = wire.report().memory_bytes
        for step in steps[3:]:
            optimizer.zero_grad()
            model(*given(step)).backward()
            optimizer.step()
        found.append(whole(model))
    neighbour = all_of(wire.state_dict())[1 - dist.get_rank()]
    return {
        "same": all(torch.equal(each, found[0]) for each in found),
        "step": wire.report().step,
        "memory": after_bytes - before_bytes,
        "neighbour": _refusal(lambda: wire.load_state_dict(neighbour)),
        "strange": _refusal(lambda: wire.load_state_dict({"rank0": {"format": 9}})),
    }


def in_another_world() -> dict[str, Any]:
    """The states of two ranks, taken up by four, and of four by two. In the mean, as much stays unsent."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "together"))

    def pair(seed: int) -> tuple[nn.Module, Any]:
        model = sharded(Vector, seed=seed, over=grid["together"])
        return model, gradwire.attach(model, None, "int4")

    model, wire = pair(0)
    for step in range(3):
        model(*given(step)).backward()
    folder = Path(os.environ[FOLDER], "two ranks")
    apart = dist.get_rank() // 2
    wire.save(folder / str(apart))
    states = all_of(wire.state_dict())
    names = ["weight", "more"]
    mean = {
        name: sum(each[key]["memory"][name] for each, key in zip(states[:2], ("rank0", "rank1"), strict=True))
        / 2
        for name in names
    }
    found: dict[str, Any] = {}
    ways: dict[str, Callable[[Any], Any]] = {
        "list": lambda to: to.load_state_dict(states[:2]),
        "folder": lambda to: to.load(folder / "0"),
    }
    dist.barrier()
    for way, load in ways.items():
        _model, _optimizer, four = vector("int4")
        load(four)
        sums = unsent_of(four)
        found[way] = difference(sums, {name: 4 * each for name, each in mean.items()})
    found["lacking"] = _refusal(lambda: four.load_state_dict(states[0]))
    _again, two = pair(1)
    two.load_state_dict(all_of(four.state_dict()))
    found["back"] = difference(two.mean_state_dict()["mean"]["memory"], mean)
    four.load_state_dict(four.mean_state_dict())
    found["mean"] = difference(unsent_of(four), {name: 4 * each for name, each in mean.items()})
    left = all_of(four.state_dict())[1:]  # that of rank 0 is lost
    four.load_state_dict(left, missing="drop")
    found["one lost"] = difference(unsent_of(four), {name: 4 * each for name, each in mean.items()})
    return found | {"step": four.report().step}


def all_of(state: Any) -> list[Any]:
    """Those of all ranks."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def loaded_into(recipe: str) -> dict[str, Any]:
    """A state of int4 goes on under another recipe: what is unsent goes along in the next step."""
    model, optimizer, wire = vector("int4")
    world, arrived = dist.get_world_size(), {"weight": 0.0, "more": 0.0}
    state: Any = None
    for step in range(4):
        if step == 2:
            state = wire.state_dict()
            model, optimizer, wire = vector(recipe)
            wire.load_state_dict(state)
        optimizer.zero_grad()
        model(*given(step)).backward()
        optimizer.step()
        arrived = {name: arrived[name] + world * each for name, each in gradients(model).items()}
    [own] = state.values()
    strange = {**own, "memory": {**own["memory"], "other": torch.ones(3)}}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        refused_of = _refusal(lambda: wire.load_state_dict(strange))
        wire.load_state_dict(strange, missing="drop")
    return {
        "off": difference(arrived, total(range(4))),
        "memory": wire.report().memory_bytes,
        "strange": refused_of,
        "ignored": _refusal(lambda: wire.load_state_dict(own, missing="ignore")),
        "warned": any("have changed since" in str(each.message) for each in warned),
    }


def switched(then: str, **options: Any) -> dict[str, Any]:
    """What is unsent goes along: all that was given arrives, or is unsent, whatever follows."""
    model, optimizer, wire = vector("int4", **options)
    world, arrived = dist.get_world_size(), {"weight": 0.0, "more": 0.0}
    seen_memory = []
    for step in range(5):
        if step == 2:
            wire.switch(then, gather="int8")
        optimizer.zero_grad()
        model(*given(step)).backward()
        optimizer.step()
        arrived = {name: arrived[name] + world * each for name, each in gradients(model).items()}
        seen_memory.append(wire.report().memory_bytes)
    unsent = unsent_of(wire)
    both = {name: arrived[name] + unsent.get(name, 0.0) for name in arrived}
    return {
        "off": difference(both, total(range(5))),
        "memory": seen_memory,
        "kinds": [kinds(wire, "gathered"), kinds(wire, "scattered")],
        "refused": _refusal(lambda: wire.switch("topk")),
        "unlike": _refusal(lambda: wire.switch("int8" if dist.get_rank() else "int4")),
    }


def detached(**options: Any) -> dict[str, Any]:
    """What is unsent lands in the gradients, and FSDP2 is stock again."""
    model, optimizer, wire = vector("int4", gather="int8", **options)
    arrived = {"weight": 0.0, "more": 0.0}
    for step in range(3):
        optimizer.zero_grad()
        model(*given(step)).backward()
        optimizer.step()
        arrived = {name: arrived[name] + each for name, each in gradients(model).items()}
    optimizer.zero_grad()
    wire.detach()
    late = gradients(model)
    world = dist.get_world_size()
    means = {name: each / world for name, each in total(range(3)).items()}
    optimizer.zero_grad()
    model(*given(9)).backward()
    stock = gradients(model)
    again = gradwire.attach(model, optimizer, "int8")
    return {
        "off": difference({name: arrived[name] + late[name] for name in late}, means),
        "late": max(float(each.abs().max()) for each in late.values()) > 0,
        "stock": difference(stock, {name: each / world for name, each in total([9]).items()}),
        "refused": _refusal(wire.flush),
        "again": again.report().recipe,
    }


def told_without_a_wire() -> dict[str, Any]:
    """A model whose wire nobody keeps, and whose metrics go to a function over the model: the steps that the
    function is told, and whether the model goes at last."""
    model, told = sharded(), list[int]()

    def take(of: nn.Module, _metrics: Any, step: int) -> None:
        assert of.training
        told.append(step)

    optimizer = adam(model)
    gradwire.attach(model, optimizer, "int4").log_to(partial(take, model), every=1)
    gc.collect()
    train(model, optimizer, range(3))
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    return {"told": told, "gone": gone() is None}


def within_checkpoints(again: bool) -> dict[str, Any]:
    """Trainings whose blocks are computed again in the backward pass: steps, and what was warned of."""
    model = sharded(partial(Layered, again=again))
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, "int4", gather="int8")
    ended: list[int] = []
    wire.log_to(lambda _metrics, step: ended.append(step), every=1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(model, optimizer, range(4))
        with wire.no_sync():
            loss_of(model, 4).backward()
        train(model, optimizer, range(5, 6))
    return {
        "step": wire.report().step,
        "ended": len(ended),
        "warned": [str(each.message) for each in warned if "backward passes" in str(each.message)],
        "masters": whole(model).tolist(),
    }


# -- two levels


NODES = {
    "in a row": [[0, 1], [2, 3]],
    "apart": [[0, 2], [1, 3]],
    "crossed": [[0, 3], [1, 2]],
}
"""Two nodes of two, by how ranks are numbered."""


def _rows(step: int, rank: int) -> Tensor:
    """A rank's gradients as FSDP2 scatters them to four: to each two rows of 50, and 13 elements."""
    weight, more = given(step, rank)
    padded = nn.functional.pad(weight, (0, 0, 0, 1)), nn.functional.pad(more, (0, 2))
    return torch.cat([each.view(4, -1) for each in padded], 1)


def by_nodes(recipe: str, nodes: list[list[int]]) -> dict[str, Any]:
    """Gradients beside those of a slow twin, which adds up node by node and codes row by row."""
    model, optimizer, wire = vector(recipe, nodes=nodes)
    chosen, parts, same = scattering(parsed(recipe)), (100, 13), []
    coding = chosen.coding
    assert coding is not None
    left: dict[tuple[int, int], Tensor] = {}
    for step in range(4):
        optimizer.zero_grad()
        model(*given(step)).backward()
        optimizer.step()
        rows, sums = [_rows(step, rank) for rank in range(4)], torch.empty(4, 113)
        for target in range(4):
            place = next(node.index(target) for node in nodes if target in node)
            codes = torch.empty(2, coding.row_bytes(parts, torch.float32), dtype=torch.uint8)
            for code, sender in zip(codes, sorted(node[place] for node in nodes), strict=True):
                one, other = next(node for node in nodes if sender in node)
                x = rows[one][target] + rows[other][target] + left.get((sender, target), 0.0)
                coding.encode(x, code[None], parts, 0)
                if chosen.feedback:
                    left[sender, target] = x
            coding.sum(codes, sums[target], parts)
        means = sums / 4
        weight, more = means[:, :100].reshape(8, 50)[:7], means[:, 100:].reshape(52)[:50]
        found = gradients(model)
        same.append(
            torch.equal(found["weight"], weight.double()) and torch.equal(found["more"], more.double())
        )
    [state] = wire.state_dict().values()
    own = {target: x for (sender, target), x in left.items() if sender == dist.get_rank()}
    unsent = state["memory"].get("weight", torch.zeros(7, 50))
    kept = nn.functional.pad(unsent, (0, 0, 0, 1)).view(4, 100)
    report = wire.report()
    return {
        "same": same,
        "unsent": all(torch.equal(kept[target], x[:100]) for target, x in own.items()),
        "others": [float(kept[rank].abs().max()) for rank in range(4) if rank not in own],
        "memory": report.memory_bytes,
        "bytes": [report.as_dict()["scatter_bytes_per_step"], report.inside_bytes_per_step],
        "ring": report.dense_bytes_per_step,
        "text": str(report),
    }


def gathers_by_nodes(nodes: list[list[int]]) -> dict[str, Any]:
    """Weights that a block computes with, beside those of one all-gather among all ranks; and the bytes."""
    found, told = [], []
    for each in (None, nodes):
        model = sharded()
        wire = gradwire.attach(model, adam(model), "dense", gather="int8", nodes=each)
        values = seen(model)
        loss_of(model, 0).backward()
        found.append(values)
        report = wire.report()
        told.append([report.as_dict()["gather_bytes_per_step"], report.inside_bytes_per_step])
        if each is not None:
            with wire.exact(), torch.no_grad():
                loss_of(model, 0)
            exact = torch.equal(values[-1], master_of(model))
    return {
        "same": all(torch.equal(one, other) for one, other in zip(*found, strict=False)),
        "bytes": told,
        "exact": exact,
        "alike": all(alike(each.double()) for each in found[1]),
    }


def on_other_nodes() -> dict[str, Any]:
    """A state of two levels goes on among all ranks, on other nodes, and back: as much stays unsent."""
    model, optimizer, wire = vector("int4", nodes=NODES["in a row"])
    for step in range(3):
        optimizer.zero_grad()
        model(*given(step)).backward()
        optimizer.step()
    found: dict[str, Any] = {}
    sums, folder = unsent_of(wire), Path(os.environ[FOLDER], "on nodes")
    wire.save(folder)
    states = all_of(wire.state_dict())
    _, _, flat = vector("int4", nodes=None)
    flat.load(folder)
    found["flat"] = difference(unsent_of(flat), sums)
    _, _, apart = vector("int4", nodes=NODES["apart"])
    apart.load_state_dict(states)
    found["apart"] = difference(unsent_of(apart), sums)
    found["lacking"] = _refusal(lambda: apart.load_state_dict(wire.state_dict()))
    wire.load_state_dict(all_of(flat.state_dict()))
    found["back"] = difference(unsent_of(wire), sums)
    wire.load_state_dict(apart.mean_state_dict())
    found["mean"] = difference(unsent_of(wire), sums)
    return found


def comes_by_nodes() -> dict[str, Any]:
    """Groups inside and between nodes are made once something is coded, and then used again."""
    groups = len(dist.distributed_c10d._world.pg_names)
    model, optimizer, wire = vector("dense", nodes=NODES["in a row"])
    counts = [len(dist.distributed_c10d._world.pg_names) - groups]
    texts = []
    for recipe in ("int8", "dense", "int4"):
        wire.switch(recipe)
        optimizer.zero_grad()
        model(*given(0)).backward()
        optimizer.step()
        texts.append("in nodes" in str(wire.report()))
        counts.append(len(dist.distributed_c10d._world.pg_names) - groups)
    wire.detach()
    vector("int8", nodes=NODES["in a row"])
    counts.append(len(dist.distributed_c10d._world.pg_names) - groups)
    return {"groups": counts, "texts": texts}


def refused_with_groups() -> dict[str, list[Any]]:
    """What is raised, and how many groups stay lent, where the mesh's own carries no tensors on the CPU."""

    def fails(*_: Any) -> Any:
        raise MemoryError("no room")

    nodes = NODES["in a row"]
    lacks = patch.object(Traffic, "make_room", fails) if dist.get_rank() == 1 else nullcontext()
    found = {}
    with patch("gradwire.comm.groups.carries_cpu", return_value=False):
        said = _refusal(lambda: gradwire.attach(sharded(), None, "int8", checksums=True))
        found["checksums"] = [said, len(lent())]
        with lacks:
            said = _refusal(
                lambda: gradwire.attach(sharded(), None, "int4", nodes=nodes), MemoryError, PeerFailed
            )
        found["no room"] = [said, len(lent())]
    return found


def agrees_elsewhere() -> dict[str, int]:
    """How many groups stay lent, where the mesh's own carries no tensors on the CPU; and how many are new."""
    found, groups = {}, 0
    with patch("gradwire.comm.groups.carries_cpu", return_value=False):
        for how in ("gone", "detached"):
            model = sharded()
            optimizer = adam(model)
            wire = gradwire.attach(model, optimizer, "int8")
            groups = groups or len(dist.distributed_c10d._world.pg_names)
            train(model, optimizer, range(1))
            found[f"attached, then {how}"] = len(lent())
            if how == "detached":
                wire.detach()
            else:
                del model, optimizer, wire
                gc.collect()
            found[how] = len(lent())
    found["new"] = len(dist.distributed_c10d._world.pg_names) - groups
    return found


def on_unequal_nodes() -> dict[str, Any]:
    """What is said where the launcher has put three ranks on a node and one on another."""
    log, logger, found = BufferingHandler(100), logging.getLogger("gradwire"), {}
    logger.addHandler(log)

    def said(wire: gradwire.Wire) -> dict[str, Any]:
        report, records = wire.report(), list(log.buffer)
        log.buffer.clear()
        return {
            "log": [each.getMessage() for each in records if each.levelno >= logging.WARNING],
            "why": report.as_dict()["why_flat"],
            "text": " ".join(str(report).split()),
        }

    with patch.dict(os.environ, LOCAL_WORLD_SIZE="3" if dist.get_rank() < 3 else "1"):
        found["int8"] = said(vector("int8")[2])
        found["asked for"] = said(vector("int8", nodes=None)[2])
        *_, wire = vector("dense")
        found["dense"] = said(wire)
        wire.switch("int8")
        found["switched to int8"] = said(wire)
    logger.removeHandler(log)
    return found


PREDICTED = ("dense", "int8", "dense+int8", "bf16+bf16", "int8+int8", "int4+int8", "int8+exact")
"""Scatters, and after a plus gathers. Exact ones are of weights that stay, so that no bits are guessed."""


def predicted(nodes: Any) -> dict[str, Any]:
    """Bytes that a node sends over its link, bytes that a rank sends, and memory: planned and counted."""
    how: dict[str, Any] = {"rate_bit_per_s": 1e9, "step_s": 0.1, "workers": dist.get_world_size()}
    if nodes is not None:
        how |= {"per_node": len(nodes[0]), "inside_bit_per_s": 1e10}
    found = {}
    for text in PREDICTED:
        recipe, _, gather = text.partition("+")
        model = nn.Sequential(nn.Linear(50, WIDTH), nn.Linear(WIDTH, 37))
        with patch("gradwire._api.plan_fsdp.EXACT_BITS", 0.0):
            [plan] = gradwire.plan(model, sharded=True, candidates=[text], **how).candidates
        policy = BF16 if gather == "exact" else MixedPrecisionPolicy()
        for each in model:
            fully_shard(each, mesh=mesh(), mp_policy=policy)
        fully_shard(model, mesh=mesh(), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if gather == "exact" else 0.01)
        wire = gradwire.attach(model, optimizer, recipe, gather=gather or None, nodes=nodes)
        for step in range(3):
            if step == 1:  # bytes count from here on: first gathers are as they are
                wire.switch(recipe)
            optimizer.zero_grad()
            model(torch.ones(3, 50)).square().mean().backward()
            optimizer.step()
        report = wire.report()
        sent, inside = report.wire_bytes_per_step, report.inside_bytes_per_step
        found[text] = {
            "planned": [plan.node_bytes, plan.wire_bytes, plan.memory_bytes],
            "counted": [
                sent * how.get("per_node", 1),
                sent + inside,
                report.memory_bytes + report.as_dict()["held_bytes"],
            ],
            "levels": [plan.two_levels, report.per_node > 1],
        }
    return found


def inside_nodes(inside: Any = "int8", gather: Any = "int8") -> dict[str, Any]:
    """Two nodes of two: one recipe between them, FSDP2's own traffic inside; beside that uncoded."""
    grid, found, losses = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks")), [], []
    for coded in (True, False):
        model = sharded(over=grid["ranks"])
        optimizer = adam(model)
        how = {"inside": inside, "gather": gather} if coded else {}
        wire = gradwire.attach(model, optimizer, "dense", replicas=grid["nodes"], **how)
        losses.append(train(model, optimizer, range(6)))
        found.append(whole(model))
        if coded:
            values, master = seen(model), master_of(model)
            with torch.no_grad():
                loss_of(model, 7)
            with wire.exact(), torch.no_grad():
                loss_of(model, 7)
            exact = [torch.equal(each, master) for each in values]
            text, told = str(wire.report()), [kinds(wire, "gathered"), kinds(wire, "scattered")]
            wire.detach()
            values.clear()
            with torch.no_grad():
                loss_of(model, 7)
            after = torch.equal(values[0], master_of(model))
    return {
        "alike": alike(found[0]),
        "moved": float((found[0] - found[1]).abs().max()) > 0,
        "losses": losses,
        "exact": exact,
        "kinds": told,
        "text": text,
        "after": after,
        "refused": _refusal(
            lambda: gradwire.attach(
                sharded(over=grid["ranks"]), None, "int8", replicas=grid["nodes"], inside="int4"
            )
        ),
        "gather": _refusal(
            lambda: gradwire.attach(
                sharded(over=grid["ranks"]), None, "int8", replicas=grid["nodes"], gather="fp8"
            )  # type: ignore[arg-type]
        ),
    }


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BOTH = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SUITS: dict[str, dict[str, Any]] = {
    **{loop: {"loop": loop} for loop in LOOPS if loop != "normed"},
    "kept gathered": {"reshard_after_forward": False},
    "gathered again over two": {"reshard_after_forward": 2},
    "recomputing": {"make": partial(Layered, again=False)},
    "recomputing, reentrant": {"make": partial(Layered, again=True)},
    "compiled": {"compiled": True},
    "frozen": {"frozen": ("first", "blocks.0")},
    "tied": {"make": Tied},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bfloat16": {"mp_policy": BF16},
    "bfloat16, added up in float32": {"mp_policy": BOTH},
    "by columns": {"make": Columns, "shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)},
}
"""Ways to shard and to train."""

LEFT_OUT = ("cleared", "zeros", "asked", "scaler", "nan", "nan in a scaler")
"""How a step is left out, and why."""

SCENES: dict[str, Callable[[], Any]] = {
    "dense": partial(beside_stock, "dense"),
    **{f"dense, {loop}": partial(beside_stock, "dense", loop=loop) for loop in LOOPS if loop != "plain"},
    "dense, kept gathered": partial(beside_stock, "dense", reshard_after_forward=False),
    "dense, bfloat16": partial(beside_stock, "dense", mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
    "refused": refused,
    "gathers int8": partial(gathers, "int8"),
    "gathers bf16": partial(gathers, "bf16"),
    "gathers as it is": partial(gathers, None),
    "gathers int8, recomputing": partial(gathers, "int8", again=False),
    "gathers int8 of bfloat16": partial(
        gathers, "int8", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
    "gathers bf16 of bfloat16": partial(
        gathers, "bf16", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
    "gathers int8 over half": partial(gathers, "int8", reshard_after_forward=2),
    **{f"moved by {how}": partial(moved_by, how) for how in MOVED},
    "exactly": exactly,
    **{
        f"summed, {recipe}": partial(summed, recipe)
        for recipe in ("bf16", "fp8", "int8", "int4(feedback=False)", "int4")
    },
    "conserved": conserved,
    "conserved, sent twice": partial(conserved, parts=2),
    "conserved in bfloat16": partial(conserved, memory_dtype=torch.bfloat16),
    "conserved, int8": partial(conserved, "int8(feedback=True)"),
    "conserved by type": conserved_by_type,
    "unpacked otherwise": unpacked_otherwise,
    "unbiased": unbiased,
    "waited": waited,
    **{f"left out, {how}": partial(left_out, how) for how in LEFT_OUT},
    "left out, resumed": partial(left_out, "cleared", resumes=True),
    "kept": kept,
    **{f"resumed, {recipe}": partial(resumed, recipe) for recipe in ("int4", "int4(feedback=False)")},
    **{f"switched to {then}": partial(switched, then) for then in ("int8", "dense", "int4(block=64)")},
    "detached": detached,
    "in another world": in_another_world,
    **{f"int8, {name}": partial(beside_stock, "int8", "int8", **how) for name, how in SUITS.items()},
    **{f"int4, {name}": partial(beside_stock, "int4", "int8", **how) for name, how in SUITS.items()},
    "told without a wire": told_without_a_wire,
    **{f"within checkpoints, {again}": partial(within_checkpoints, again) for again in (True, False)},
    "inside nodes": inside_nodes,
    "refused with groups": refused_with_groups,
    "agrees elsewhere": agrees_elsewhere,
    **{
        f"by nodes {how}, {recipe}": partial(by_nodes, recipe, nodes)
        for how, nodes in NODES.items()
        for recipe in ("bf16", "int8", "int4")
    },
    **{f"gathers by nodes {how}": partial(gathers_by_nodes, nodes) for how, nodes in NODES.items()},
    "conserved by nodes": partial(conserved, nodes=NODES["crossed"]),
    "resumed by nodes": partial(resumed, "int4", nodes=NODES["apart"]),
    **{
        f"switched by nodes to {then}": partial(switched, then, nodes=NODES["apart"])
        for then in ("int8", "dense")
    },
    "detached by nodes": partial(detached, nodes=NODES["crossed"]),
    **{
        f"left out by nodes, {how}": partial(left_out, how, nodes=NODES["in a row"])
        for how in ("cleared", "nan")
    },
    **{
        f"{recipe} by nodes, {name}": partial(
            beside_stock, recipe, "int8", nodes=NODES["in a row"], **SUITS[name]
        )
        for recipe in ("int8", "int4")
        for name in ("plain", "branching", "prefetched", "bfloat16")
    },
    "on other nodes": on_other_nodes,
    "on unequal nodes": on_unequal_nodes,
    "predicted by nodes": partial(predicted, NODES["in a row"]),
    "predicted": partial(predicted, None),
    "comes by nodes": comes_by_nodes,
    **{f"evaluated, {recipe}": partial(evaluated, recipe) for recipe in ("int8", "int4")},
    **{
        f"norms, {recipe}, {name}": partial(beside_stock, recipe, "int8", loop="normed", mp_policy=policy)
        for recipe in ("int8", "int4")
        for name, policy in (("float32", MixedPrecisionPolicy()), ("bfloat16", BF16))
    },
    "thawed": thawed,
    "in turn": in_turn,
    "copied": copied,
    "exactly, though asked before": exactly_though_asked_before,
    "grouped, dense": partial(grouped, "dense", None),
    "grouped, int4": partial(grouped, "int4", "int8"),
    "loaded into dense": partial(loaded_into, "dense"),
}
