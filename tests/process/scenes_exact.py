"""Scenes of exact gathers: losses and masters beside stock FSDP2's with the same policy, bit for bit."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire_lab.workloads.catalogue import workload
from tests.process import fsdp_models
from tests.process.fsdp_models import (
    WIDTH,
    Layered,
    Tied,
    adam,
    alike,
    kinds,
    loss_of,
    mesh,
    reshard,
    sharded,
    train,
    whole,
)
from tests.support.ranks import FOLDER

Loop = Callable[[nn.Module, torch.optim.Optimizer], list[float]]


def bits(x: Tensor) -> Tensor:
    """The bits of numbers in float64, which are equal for equal NaNs."""
    return x.double().view(torch.int64)


def beside_stock(
    loop: Loop,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    dtype: torch.dtype = torch.bfloat16,
    nodes: Any = None,
    **how: Any,
) -> dict[str, Any]:
    """Losses and masters of a wire with exact gathers beside those of stock FSDP2."""
    found, losses = [], []
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for ours in (True, False):
        model = sharded(mp_policy=policy, **how)
        stepping = optimizer(model)
        if ours:
            wire = gradwire.attach(model, stepping, "dense", gather="exact", nodes=nodes, guard_every=2)
            model.wire = wire  # type: ignore[assignment]
        losses.append(torch.tensor(loop(model, stepping), dtype=torch.float64))
        found.append(whole(model))
        if ours:
            sent, report = kinds(wire, "gathered"), wire.report()
            del model.wire
    return {
        "same": torch.equal(bits(found[0]), bits(found[1])) and torch.equal(*map(bits, losses)),
        "alike": alike(bits(found[0])),
        "kinds": sent,
        "held": report.held_bytes,  # type: ignore[attr-defined]
        "text": str(report),
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return train(model, optimizer, range(5))


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Evaluations between backward and step, and after it, also within `exact()`."""
    losses = []
    wire = getattr(model, "wire", None)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            losses.append(float(loss_of(model, 50 + step)))
        optimizer.step()
        with wire.exact() if wire else nullcontext(), torch.no_grad():
            losses.append(float(loss_of(model, 60 + step)))
    return losses


def thawed(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Parts are frozen and thawed between steps."""
    losses = train(model, optimizer, range(2))
    model.side.requires_grad_(False)  # type: ignore[union-attr,operator]
    losses += train(model, optimizer, range(2, 4))
    model.side.requires_grad_(True)  # type: ignore[union-attr,operator]
    return losses + train(model, optimizer, range(4, 6))


def left_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss_of(model, 7).backward()
    return losses + train(model, optimizer, range(2, 4))


def not_a_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """A master becomes NaN, and goes back."""
    losses = train(model, optimizer, range(2))
    saved = copy.deepcopy({name: each.detach().clone() for name, each in model.state_dict().items()})
    reshard(model)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(torch.nan)
    losses += train(model, optimizer, range(2, 4))
    reshard(model)
    model.load_state_dict(saved)
    optimizer.state.clear()
    return losses + train(model, optimizer, range(4, 6))


def dropped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """A gather is begun, and its result is thrown away."""
    losses = train(model, optimizer, range(2))
    begun(model, is_dropped=True)
    return losses + train(model, optimizer, range(2, 5))


def begun(model: nn.Module, *, is_dropped: bool) -> weakref.ref[Tensor]:
    """Gather the first block by hand, and let it go. Returns what was gathered."""
    block = model.blocks[0]  # type: ignore[index]
    assert isinstance(block, FSDPModule)
    block.unshard(async_op=True)
    state: Any = block._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    gathered = weakref.ref(groups[0]._all_gather_result.all_gather_output)
    if is_dropped:
        groups[0]._all_gather_result = None
    else:
        block.unshard()
    block.reshard()
    return gathered


def moved(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Masters are moved in ways that torch may not count."""
    losses = train(model, optimizer, range(2))
    saved = {name: each.detach().clone() for name, each in model.state_dict().items()}
    folder = Path(os.environ[FOLDER], "exact")
    reshard(model)
    is_here = how != "on one rank" or dist.get_rank() == 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if how == ".data":
                parameter.data.mul_(1.5)
            elif how in ("_local_tensor", "on one rank") and is_here:
                assert isinstance(parameter, DTensor)
                parameter._local_tensor.mul_(1.5)
            elif how == "average":
                parameter.copy_(0.5 * saved[name])
    if how == "load_state_dict":
        model.load_state_dict({name: 0.5 * each for name, each in saved.items()})
    elif how == "dcp":
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
        losses += train(model, optimizer, range(2, 4))
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    return losses + train(model, optimizer, range(4, 6))


def in_backward(model: nn.Module) -> torch.optim.Optimizer:
    """Each parameter has an optimizer, which steps in the backward pass as soon as its gradient is there."""
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.05)

        def step(_parameter: Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return torch.optim.SGD(model.parameters(), lr=0.0)  # finds no gradients


def gathered_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Three micro-batches a step, between which parameters stay gathered."""
    losses = []
    assert isinstance(model, FSDPModule)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_reshard_after_backward(part == 2)
            loss = loss_of(model, 3 * step + part)
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def far_ahead(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """All gathers of a pass are in flight at once."""
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for number, each in enumerate(modules):
        each.set_modules_to_forward_prefetch(modules[number + 1 :])
        each.set_modules_to_backward_prefetch(modules[:number][::-1])
    return train(model, optimizer, range(5))


def raised(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """All ranks raise in the middle of a pass, catch it, and begin the next pass."""
    losses = train(model, optimizer, range(2))
    last = model.blocks[-1][0]  # type: ignore[index]

    def refuse(*_: Any) -> None:
        raise KeyError("planted")

    planted = last.register_forward_pre_hook(refuse)
    with suppress(KeyError):
        loss_of(model, 9)
    planted.remove()
    return losses + train(model, optimizer, range(2, 5))


class Adapted(nn.Linear):
    """A linear layer, and beside it an adapter of rank 4."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.up(self.down(inputs))


class WithAdapters(Layered):
    """Blocks whose weights are frozen beside adapters that are trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[0] = Adapted()


def each_alone() -> dict[str, Any]:
    """A root with 40 modules under `fully_shard`, some of them of 130 parameters."""
    found, policy = [], MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for ours in (True, False):
        torch.manual_seed(0)
        model = Layered(blocks=20)
        for block in model.blocks:
            for each in block.children():
                fully_shard(each, mesh=mesh(), mp_policy=policy)
        fully_shard(model, mesh=mesh(), mp_policy=policy)
        optimizer = adam(model)
        if ours:
            wire = gradwire.attach(model, optimizer, "dense", gather="exact", nodes=None)
        losses = far_ahead(model, optimizer)
        found.append((whole(model), torch.tensor(losses, dtype=torch.float64)))
        if ours:
            sent = kinds(wire, "gathered")
    return {"same": all(torch.equal(*map(bits, pair)) for pair in zip(*found, strict=True)), "kinds": sent}


def signs(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose steps have one size in all directions, as Muon's nearly have."""

    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.sub_(each.grad.sign(), alpha=group["lr"])

    return Signs(model.parameters(), {"lr": 0.01})


class Both(list[torch.optim.Optimizer]):
    """Several optimizers, which step one after the other."""

    def zero_grad(self) -> None:
        for each in self:
            each.zero_grad()

    def step(self) -> None:
        for each in self:
            each.step()


def muon(model: nn.Module) -> Any:
    """torch's Muon for the matrices of blocks, and AdamW for all else."""
    inner = [each for name, each in model.named_parameters() if each.ndim == 2 and "blocks" in name]
    others = [each for each in model.parameters() if not any(each is one for one in inner)]
    return Both([torch.optim.Muon(inner, lr=0.02), torch.optim.AdamW(others, lr=0.01)])


def other_world() -> dict[str, Any]:
    """A run of all ranks is saved by DCP, and goes on in halves of them, each with a wire of its own."""
    policy, found = MixedPrecisionPolicy(param_dtype=torch.bfloat16), []
    halves = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("halves", "ranks"))
    for ours in (True, False):
        folder = Path(os.environ[FOLDER], f"other world {ours}")
        model = sharded(mp_policy=policy)
        optimizer = sgd(model)
        if ours:
            gradwire.attach(model, optimizer, "dense", gather="exact", nodes=None)
        train(model, optimizer, range(3))
        reshard(model)
        parts = get_state_dict(model, optimizer)
        dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder)
        model = sharded(seed=4, over=halves["ranks"], mp_policy=policy)
        optimizer = sgd(model)
        if ours:
            wire = gradwire.attach(model, optimizer, "dense", gather="exact", nodes=None)
        train(model, optimizer, range(1))
        reshard(model)
        parts = get_state_dict(model, optimizer)
        state = {"model": parts[0], "optimizer": parts[1]}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        losses = train(model, optimizer, range(3, 6))
        found.append((whole(model), torch.tensor(losses, dtype=torch.float64)))
        if ours:
            sent = kinds(wire, "gathered")
    return {"same": all(torch.equal(*map(bits, pair)) for pair in zip(*found, strict=True)), "kinds": sent}


def of_text(steps: int = 6) -> dict[str, Any]:
    """The lab's transformer over characters, with its optimizer and its data."""
    found = []
    for ours in (True, False):
        work = workload("chargpt")
        model = work.model(0)
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model, mesh=mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        optimizer = work.optimizer(model.parameters())
        if ours:
            wire = gradwire.attach(model, optimizer, "dense", gather="exact", nodes=None)
        batches, losses = work.batches(dist.get_rank(), dist.get_world_size(), 0), []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = work.loss(model, next(batches))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        found.append((whole(model), torch.tensor(losses, dtype=torch.float64)))
        if ours:
            report = wire.report().as_dict()
    return {
        "same": all(torch.equal(*map(bits, pair)) for pair in zip(*found, strict=True)),
        "of stock": report["gather_bytes_per_step"] / (report["dense_bytes_per_step"] * 2 / 3),
    }


def resumed() -> dict[str, Any]:
    """A run that stops and goes on in new objects, beside one that does not."""
    policy, found = MixedPrecisionPolicy(param_dtype=torch.bfloat16), []
    for stops in (False, True):
        model = sharded(mp_policy=policy)
        optimizer = sgd(model)
        wire = gradwire.attach(model, optimizer, "int4", gather="exact", nodes=None)
        train(model, optimizer, range(3))
        if stops:
            state, steps, ours = model.state_dict(), optimizer.state_dict(), wire.state_dict()
            model = sharded(seed=4, mp_policy=policy)
            optimizer = sgd(model)
            wire = gradwire.attach(model, optimizer, "int4", gather="exact", nodes=None)
            model.load_state_dict(state)
            optimizer.load_state_dict(steps)
            wire.load_state_dict(ours)
        train(model, optimizer, range(3, 6))
        found.append(whole(model))
    return {"same": torch.equal(*found)}


def switched() -> dict[str, Any]:
    """From rounded gathers to exact ones and back, with weights as a block computes with them."""
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, "dense", gather="int8", nodes=None)
    train(model, optimizer, range(2))
    found = []
    for gather in ("exact", None, "exact"):
        wire.switch("dense", gather=gather)  # type: ignore[arg-type,call-arg]
        train(model, optimizer, range(2))
        found.append(kinds(wire, "gathered"))
    wire.detach()
    return {"kinds": found, "losses": train(model, optimizer, range(2))}


def switched_in_between() -> dict[str, Any]:
    """A switch of the recipe alone: what is held stays, and is allocated once."""
    policy, found = MixedPrecisionPolicy(param_dtype=torch.bfloat16), []
    for switches in (True, False):
        model = sharded(mp_policy=policy)
        optimizer = sgd(model)
        wire = gradwire.attach(model, optimizer, "dense", gather="exact", nodes=None)
        train(model, optimizer, range(3))
        if switches:
            wire.switch("dense")
        train(model, optimizer, range(3, 6))
        found.append(whole(model))
        if switches:
            sent = kinds(wire, "gathered")
    return {"same": torch.equal(*found), "kinds": sent}


def let_go() -> dict[str, bool]:
    """Whether gathered parameters are gone: after a gather, and after one that FSDP2 has dropped."""
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    wire = gradwire.attach(model, adam(model), "dense", gather="exact", nodes=None)
    reshard(model)

    def is_gone(gathered: weakref.ref[Tensor]) -> bool:
        gc.collect()
        return gathered() is None

    found = {"waited for": is_gone(begun(model, is_dropped=False))}
    gathered = begun(model, is_dropped=True)
    wire.switch("dense", gather="exact")  # type: ignore[call-arg]
    found["switched"] = is_gone(gathered)
    gathered = begun(model, is_dropped=True)
    wire.detach()
    return found | {"detached": is_gone(gathered)}


def refused() -> dict[str, str]:
    """Each in its words."""

    def said(model: nn.Module, **how: Any) -> str:
        try:
            gradwire.attach(model, None, how.pop("recipe", "dense"), **how)
        except ValueError as error:
            return str(error)
        return ""

    def switched(gather: str) -> str:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
        wire = gradwire.attach(fully_shard(model, mesh=mesh()), None, "dense")
        try:
            wire.switch("dense", gather=gather)  # type: ignore[call-arg]
        except ValueError as error:
            return str(error)
        return ""

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {
        "mixed, exact": switched("exact"),
        "mixed, int8": switched("int8"),
        "float32": said(sharded(), gather="exact"),
        "held_on": said(sharded(mp_policy=half), gather="int8", held_on="host"),
        "guard_every": said(sharded(), guard_every=5),
        "nowhere": said(sharded(mp_policy=half), gather="exact", held_on="disk"),
    }


FROZEN = "first", "last", "side", *(f"blocks.{block}.0.{name}" for block in range(2) for name in ("w", "b"))
"""Where names of parameters begin that are not adapters'."""
PLAIN: dict[str, dict[str, Any]] = {
    "AdamW": {"loop": plain},
    "SGD": {"loop": plain, "optimizer": sgd},
    "signs": {"loop": plain, "optimizer": signs},
    "Muon": {"loop": plain, "optimizer": muon},
    "float16": {"loop": plain, "dtype": torch.float16},
    **{
        name: {"loop": getattr(fsdp_models, name)}
        for name in ("clipped", "accumulated", "sent_twice", "branching", "prefetched")
    },
    "frozen": {"loop": plain, "frozen": ("first", "blocks.0")},
    "thawed": {"loop": thawed},
    "tied": {"loop": plain, "make": Tied},
    "recomputing": {"loop": plain, "make": partial(Layered, again=False)},
    "recomputing, reentrant": {"loop": plain, "make": partial(Layered, again=True)},
    "kept gathered": {"loop": plain, "reshard_after_forward": False},
    "compiled": {"loop": plain, "compiled": True},
    "evaluated": {"loop": evaluated},
    "left out": {"loop": left_out},
    "not a number": {"loop": not_a_number},
    "dropped": {"loop": dropped},
    "gathered once": {"loop": gathered_once},
    "far ahead": {"loop": far_ahead, "make": partial(Layered, blocks=6)},
    "raised": {"loop": raised},
    "adapters": {"loop": evaluated, "make": WithAdapters, "frozen": FROZEN},
    "offloaded": {"loop": plain, "offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "moved in backward": {"loop": plain, "optimizer": in_backward},
    **{
        f"moved by {how}": {"loop": partial(moved, how)}
        for how in (".data", "_local_tensor", "average", "load_state_dict", "dcp", "on one rank")
    },
    "fused": {"loop": plain, "optimizer": partial(adam, fused=True)},
    "for-loop": {"loop": plain, "optimizer": partial(adam, foreach=False)},
}

SCENES: dict[str, Callable[[], Any]] = {
    **{name: partial(beside_stock, **how) for name, how in PLAIN.items()},
    "gathered again over two": partial(beside_stock, plain, reshard_after_forward=2),
    "by nodes": partial(beside_stock, plain, nodes=[[0, 1], [2, 3]]),
    "by nodes, dropped": partial(beside_stock, dropped, nodes=[[0, 2], [1, 3]]),
    "resumed": resumed,
    "switched": switched,
    "switched in between": switched_in_between,
    "in another world": other_world,
    "each alone": each_alone,
    "of text": of_text,
    "let go": let_go,
    "refused": refused,
}
