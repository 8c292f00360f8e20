"""Scenes of saving and resuming, and of what `attach` refuses, on real ranks."""

from __future__ import annotations

import importlib
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.integrations.dcp import WireState
from tests.support.models import batch, digest, optimizer_of, perceptron, train
from tests.support.ranks import FOLDER
from tests.support.states import own_state

RECIPES = ("topk(ratio=0.05)", "leader_topk(ratio=0.05)", "covap(interval=4)", "randomk(ratio=0.1)")


def _round_trip(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumes(recipe: str) -> dict[str, Any]:
    """Twenty steps through, against ten, a checkpoint, and ten more in buckets of another size."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, recipe)
    train(ddp, optimizer, range(10))
    saved = _round_trip({"model": ddp.module.state_dict(), "wire": wire.state_dict()})
    train(ddp, optimizer, range(10, 20))

    model = perceptron(seed=1)
    model.load_state_dict(saved["model"])
    again = DistributedDataParallel(model, bucket_cap_mb=25)
    wire_again = gradwire.attach(again, optimizer_of(again), recipe)
    wire_again.load_state_dict(saved["wire"])
    optimizer = optimizer_of(again)
    train(again, optimizer, range(10, 11))
    first_bytes = wire_again.report().metered_bytes_per_step
    train(again, optimizer, range(11, 20))
    return {
        "through": digest(ddp),
        "resumed": digest(again),
        "first_share": first_bytes / wire_again.report().dense_bytes_per_step,
    }


def from_three_to_two() -> dict[str, Any]:
    """The same processes, as a world of three and then of two: what was unsent in the mean stays."""
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, RECIPES[0])
    train(ddp, optimizer, range(5))
    states: list[Any] = [None] * 3
    dist.all_gather_object(states, own_state(wire))
    mean = wire.mean_state_dict()
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return {}
    smaller = DistributedDataParallel(perceptron(), process_group=pair)
    optimizer = optimizer_of(smaller)
    wire = gradwire.attach(smaller, optimizer, RECIPES[0])
    try:
        wire.load_state_dict(states[dist.get_rank()])
        refused = ""
    except ValueError as error:
        refused = str(error)
    wire.load_state_dict(states)
    memory = own_state(wire)["memory"]
    wire.load_state_dict(mean)
    from_mean = own_state(wire)["memory"]
    wire.load_state_dict(states)
    smaller(batch(5)[0]).sum().backward()
    optimizer.zero_grad()
    after = own_state(wire)["memory"]
    return {
        "refused": refused,
        "left out": all(torch.equal(memory[name], after[name]) for name in memory),
        "mean": all(
            torch.equal(memory[name], torch.stack([old["memory"][name] for old in states]).mean(0))
            for name in memory
        ),
        "from_mean": all(torch.allclose(memory[name], from_mean[name], atol=1e-6) for name in memory),
        "step": wire.report().step,
    }


def through_dcp() -> dict[str, Any]:
    """A checkpoint of two ranks, loaded by two and by three."""
    folder, recipe = Path(os.environ[FOLDER], "dcp"), "dgc(ratio=0.05, warmup_steps=0)"
    pair = dist.new_group([0, 1])
    states: list[Any] = [None] * 3
    mine: dict[str, Any] | None = None
    again = True
    if dist.get_rank() < 2:
        ddp = DistributedDataParallel(perceptron(), process_group=pair)
        optimizer = optimizer_of(ddp)
        wire = gradwire.attach(ddp, optimizer, recipe)
        train(ddp, optimizer, range(4))
        dcp.save({"wire": WireState(wire)}, checkpoint_id=folder, process_group=pair)
        mine = own_state(wire)
        train(ddp, optimizer, range(4, 6))
        dcp.load({"wire": WireState(wire, folder)}, checkpoint_id=folder, process_group=pair)
        again = _same(own_state(wire) | {"why": mine["why"]}, mine)
    dist.all_gather_object(states, mine)
    ddp = DistributedDataParallel(perceptron())
    wire = gradwire.attach(ddp, optimizer_of(ddp), recipe)
    dcp.load({"wire": WireState(wire, folder)}, checkpoint_id=folder)
    found = own_state(wire)
    both = [{"memory": each["memory"], **each["planes"]} for each in states[:2]]
    three = {"memory": found["memory"], **found["planes"]}
    means = [
        torch.equal(memory, torch.stack([each[plane][name] for each in both]).mean(0))
        for plane, memories in three.items()
        for name, memory in memories.items()
    ]
    return {"again": again, "mean": all(means), "compared": len(means), "step": found["step"]}


class _Full(dict[str, Any]):
    """What nobody has the memory to read."""

    def values(self) -> Any:
        raise MemoryError("none left")


class _Unlucky(WireState):
    """Gets such a state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(_Full(state))


def dcp_on_one_rank_only() -> dict[str, Any]:
    """Rank 1 cannot read the checkpoint's metadata, or has no memory for what it has read."""
    folder = Path(os.environ[FOLDER], "dcp of all")
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.05)")
    train(ddp, optimizer, range(3))
    dcp.save({"wire": WireState(wire)}, checkpoint_id=folder)
    train(ddp, optimizer, range(3, 5))
    before, said = own_state(wire), {}
    damages: dict[str, Callable[[Path], Any]] = {
        "lost": Path.unlink,
        "damaged": lambda file: file.write_bytes(file.read_bytes()[:100]),
        "no memory": lambda file: None,
    }
    for name, damage in damages.items():
        loaded = WireState(wire, folder)
        if dist.get_rank() == 1:
            mine = folder.with_name(name)
            shutil.copytree(folder, mine)
            damage(mine / ".metadata")
            loaded = WireState(wire, mine)
            if name == "no memory":
                loaded = _Unlucky(wire, mine)
        try:
            dcp.load({"wire": loaded}, checkpoint_id=folder)
            said[name] = ["nothing", ""]
        except Exception as error:
            said[name] = [type(error).__name__, str(error)]
    intact = _same(own_state(wire), before)
    train(ddp, optimizer, range(5, 7))
    return {"said": said, "intact": intact, "digest": digest(ddp)}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


def _refusal(attach: Callable[[], Any]) -> list[str]:
    try:
        attach()
    except (ValueError, gradwire.RanksDisagree) as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def _wrapped(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(perceptron() if module is None else module, **options)


def refuses_what_is_wrong() -> dict[str, list[str]]:
    """Everything that is wrong in the same way on all ranks."""
    twice = _wrapped()
    gradwire.attach(twice, None, "dense")
    detached = _wrapped()
    gradwire.attach(detached, None, "dense").detach()
    hooked = _wrapped()
    hooked.register_comm_hook(None, allreduce_hook)
    tables = _wrapped(nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 4)))
    complex_ = _wrapped(nn.Linear(4, 4, dtype=torch.complex64))
    ddp = _wrapped()
    cases: dict[str, Callable[[], Any]] = {
        "not ddp": lambda: gradwire.attach(perceptron()),
        "second attach": lambda: gradwire.attach(twice),
        "attach after detach": lambda: gradwire.attach(detached),
        "second hook": lambda: gradwire.attach(hooked),
        "unknown recipe": lambda: gradwire.attach(ddp, None, "covapp"),
        "unknown key": lambda: gradwire.attach(ddp, None, "topk(ratoi=0.1)"),
        "ratio": lambda: gradwire.attach(ddp, None, "topk(ratio=1.5)"),
        "type": lambda: gradwire.attach(ddp, None, "topk(ratio='much')"),
        "interval type": lambda: gradwire.attach(ddp, None, "covap(interval=2.5)"),
        "target": lambda: gradwire.attach(ddp, None, target=1.5),
        "policy": lambda: gradwire.attach(ddp, None, "topk", policy={"*": "topkk"}),
        "policy that matches nothing": lambda: gradwire.attach(
            ddp, None, "topk", policy={"*.wieght": "int8"}
        ),
        "foreign optimizer": lambda: gradwire.attach(ddp, optimizer_of(_wrapped()), "topk"),
        "policy that measures": lambda: gradwire.attach(ddp, None, "topk", policy={"*": "covap"}),
        "sparse": lambda: gradwire.attach(tables),
        "complex": lambda: gradwire.attach(complex_),
    }
    return {name: _refusal(case) for name, case in cases.items()}


class Sparse(nn.Linear):
    """A module with a `sparse` attribute that has nothing to do with gradients."""

    sparse = True


def takes_what_is_right() -> bool:
    """After refusals, and on a module that only looks sparse, attaching works."""
    ddp = _wrapped(Sparse(64, 64))
    for wrong in ("covapp", "topk(ratio=2)"):
        assert _refusal(partial(gradwire.attach, ddp, None, wrong))[0] == "ValueError"
    gradwire.attach(ddp, None, "topk(ratio=0.5)")
    ddp(torch.ones(1, 64)).sum().backward()
    return all(bool(p.grad.any()) for p in ddp.parameters() if p.grad is not None)


def disagreements() -> dict[str, list[str]]:
    """Everything that is right on each rank but differs between them; shapes DDP compares itself."""
    odd = dist.get_rank() == 1
    names = nn.Sequential(nn.Linear(4, 4)) if odd else nn.ModuleDict({"x": nn.Linear(4, 4)})
    dtype = torch.float64 if odd else torch.float32
    hooked = _wrapped()
    if odd:
        hooked.register_comm_hook(None, allreduce_hook)
    cases: dict[str, Callable[[], Any]] = {
        "recipe": lambda: gradwire.attach(_wrapped(), None, "topk(ratio=0.2)" if odd else "topk(ratio=0.1)"),
        "the configuration": lambda: gradwire.attach(_wrapped(), None, "topkk" if odd else "topk"),
        "seed": lambda: gradwire.attach(_wrapped(), None, "topk", seed=int(odd)),
        "parameter names": lambda: gradwire.attach(_wrapped(names), None, "topk"),
        "parameter dtypes": lambda: gradwire.attach(_wrapped(nn.Linear(4, 4, dtype=dtype)), None, "dense"),
        "policy": lambda: gradwire.attach(
            _wrapped(), None, "topk", policy={"*.bias": "topk"} if odd else None
        ),
        "scaler": lambda: gradwire.attach(
            _wrapped(), None, "topk", scaler=torch.amp.GradScaler("cpu") if odd else None
        ),
        "memory_dtype": lambda: gradwire.attach(
            _wrapped(), None, "topk", memory_dtype=torch.bfloat16 if odd else None
        ),
        "the optimizer's place": lambda: gradwire.attach(_wrapped(), "topk" if odd else None, "topk"),  # type: ignore[arg-type]
        "no seed": lambda: gradwire.attach(_wrapped(), None, "topk", seed=None if odd else 0),  # type: ignore[arg-type]
        "no scaler": lambda: gradwire.attach(_wrapped(), None, "topk", scaler=1.0 if odd else None),  # type: ignore[arg-type]
        "a hook": lambda: gradwire.attach(hooked, None, "topk"),
        "optimizer": lambda: _attach_with(None if odd else torch.optim.SGD),
        "optimizer group 0 lr": lambda: _attach_with(partial(torch.optim.SGD, lr=0.2 if odd else 0.1)),
        "gradwire version": partial(_attach_as, "0.0.0" if odd else gradwire.__version__),
    }
    return {name: _refusal(case) for name, case in cases.items()}


def refused_on_a_pair() -> list[str]:
    """Two refusals on some of the ranks, which come at different times, and a training after them."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return []
    said = []
    for _ in range(2):
        said += _refusal(lambda: gradwire.attach(_wrapped(process_group=pair), None, "topq"))[:1]
        time.sleep(0.2 * dist.get_rank())
    ddp = _wrapped(process_group=pair)
    optimizer = optimizer_of(ddp)
    gradwire.attach(ddp, optimizer, "topk(ratio=0.05)")
    train(ddp, optimizer, range(3))
    return [*said, digest(ddp)]


def _attach_with(optimizer: Callable[..., torch.optim.Optimizer] | None) -> Any:
    ddp = _wrapped()
    return gradwire.attach(ddp, None if optimizer is None else optimizer(ddp.parameters()), "topk")


def _attach_as(version: str) -> Any:
    module = importlib.import_module("gradwire._api.configuration")
    honest = module.__version__
    module.__version__ = version
    try:
        return gradwire.attach(_wrapped(), None, "topk")
    finally:
        module.__version__ = honest


def without_process_group() -> list[str]:
    """Last, because nothing can follow it."""
    ddp = _wrapped()
    dist.destroy_process_group()
    return _refusal(lambda: gradwire.attach(ddp))


def read_one_by_one() -> dict[str, Any]:
    """Rank 0 cannot read the second of the states, which it reads one by one; then it can."""
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.05)")
    train(ddp, optimizer, range(2))
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, wire.state_dict())

    def read(*, fails: bool) -> Iterator[Any]:
        yield states[0]
        if fails and dist.get_rank() == 0:
            raise FileNotFoundError("wire-1.pt")
        yield from states[1:]

    said = ""
    try:
        wire.load_state_dict(read(fails=True))
    except (OSError, gradwire.GradwireError) as error:
        said = f"{type(error).__name__}: {error}"
    wire.load_state_dict(read(fails=False))
    return {"said": said, "step": wire.report().step}


SCENES: dict[str, Callable[[], Any]] = {
    "read one by one": read_one_by_one,
    **{recipe: partial(resumes, recipe) for recipe in RECIPES},
    "three to two": from_three_to_two,
    "dcp": through_dcp,
    "dcp, one rank": dcp_on_one_rank_only,
    "refusals": refuses_what_is_wrong,
    "right": takes_what_is_right,
    "refused on a pair": refused_on_a_pair,
    "disagreements": disagreements,
    "no process group": without_process_group,
}
