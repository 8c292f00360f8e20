"""Scenes of sharded modules, on two nodes: beside FSDP's own averaging between nodes."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire
from gradwire.checkpoint.state import Missing
from gradwire.errors import PeerFailed, RanksDisagree
from gradwire.integrations.dcp import WireState
from tests.device.scenes_placed import on, watched
from tests.device.scenes_resumed import PLACES
from tests.process.sharded_models import Blocks, attached, loss_of, mesh, sharded, train, whole
from tests.support.ranks import FOLDER
from tests.support.simulated import DEFAULT, HOST, Near, Simulated
from tests.support.states import own_state

LOSSY = "topk(ratio=0.1)"
OF_SHARDS = ("dgc(ratio=0.1, warmup_steps=0)", "signum", "scalecom(warmup_steps=0)", "covap(interval=2)")
"""Recipes that apply momentum to the shard, or choose by it."""


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, quiet: Callable[[], Any]) -> None:
    """Two micro-batches a step, of which `quiet` holds back the first."""
    for step in range(3):
        optimizer.zero_grad()
        with quiet():
            loss_of(model, 2 * step).backward()
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()


@contextmanager
def unsynchronised(model: nn.Module) -> Iterator[None]:
    """FSDP's own way: no reduce-scatter, so that no hook is called."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def grads(model: nn.Module) -> Tensor:
    """All gradients of this rank in a row."""
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    return torch.cat(
        [p.grad.to_local().reshape(-1).double() for p in model.parameters() if p.grad is not None]
    )


def alike(values: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    others = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(others, values)
    return all(torch.equal(values, other) for other in others)


def beside_native(loop: str = "clipped", **how: Any) -> dict[str, float]:
    """Dense, against HSDP's own all-reduce between nodes."""
    models = [sharded(**how), sharded(mesh(), **how)]
    assert isinstance(models[1], FSDPModule)
    if torch.__version__ >= "2.13":  # before, there is no such call, and no scene that needs it passes
        models[1].set_reduce_scatter_unused_params(True)  # zeros, as ours, not no gradient
    optimizer, wire = attached(models[0], "dense")
    theirs = torch.optim.SGD(models[1].parameters(), lr=0.05)
    for model, each in zip(models, (optimizer, theirs), strict=True):
        if loop in ("clipped", "branched"):
            assert isinstance(model, Blocks)
            model.branches = loop == "branched"
            train(model, each, range(5))
        else:
            ours = (
                wire.no_sync if model is models[0] and loop == "no_sync" else partial(unsynchronised, model)
            )
            accumulate(model, each, ours)
    ours, native = map(whole, models)
    return {
        "off": float((ours - native).abs().max()),
        "alike": float(alike(ours)),
        "steps": wire.report().step,
    }


def learns(recipe: str) -> dict[str, Any]:
    """How much of the loss is left, and whether all ranks have one model."""
    model = sharded()
    optimizer, wire = attached(model, recipe)
    losses = train(model, optimizer, range(20), clip=False)
    largest = 2 * 4 * sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    memory = wire.report().memory_bytes / largest
    both = torch.cat([whole(model), *(each.double() for each in model.buffers())])
    return {"left": losses[-1] / losses[0], "alike": alike(both), "memory": memory}


def checkpointed(reentrant: bool, **how: Any) -> dict[str, Any]:
    """Against the same without checkpoints."""
    found = []
    for again in (None, reentrant):
        model = sharded(reentrant=again, **how)
        optimizer, wire = attached(model, LOSSY)
        train(model, optimizer, range(4))
        found.append(whole(model))
    return {"same": torch.equal(*found), "steps": wire.report().step}


def poisoned(recipe: str, per_node: int | None = None) -> dict[str, Any]:
    """A NaN in one element of one rank's shard, which FSDP has reduced already: the other shard has none."""
    over, bad = mesh(), False
    if per_node is not None:
        sizes = dist.get_world_size() // per_node, per_node
        over = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model = sharded(over["shard"])

    def damage(parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        if bad and dist.get_rank() == 3:
            parameter.grad.to_local().view(-1)[0] = torch.nan

    assert isinstance(model, Blocks)
    assert model.blocks[1].bias is not None
    model.blocks[1].bias.register_post_accumulate_grad_hook(damage)  # ahead of ours
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wire = gradwire.attach(model, optimizer, recipe, replicas=over["replicate"])
    train(model, optimizer, range(3))
    before = own_state(wire)["memory"]
    bad = True
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    bad, nan = False, bool(grads(model).isnan().all())
    after = own_state(wire)["memory"]
    kept = all(torch.equal(before[name], after[name]) for name in before)
    optimizer.zero_grad()
    train(model, optimizer, range(4, 6))
    return {"nan": nan, "kept": kept, "step": wire.report().step, "alike": alike(whole(model))}


def failed() -> str:
    """One rank's codec raises; all ranks hear of it in that step, by the rank among all."""
    model = sharded()
    optimizer, wire = attached(model, LOSSY)
    if dist.get_rank() == 3:
        [flat_buffer] = wire.attached.backward.reducer.layout.flat_buffers

        def compensate(*_: Any) -> None:
            raise OSError("no room")

        flat_buffer.compensate = compensate  # type: ignore[assignment]
    try:
        train(model, optimizer, range(1))
    except (PeerFailed, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def resumed() -> dict[str, Any]:
    """With a break in the middle, and without; then from a list of all, a mean, and a neighbour's shard."""
    found, refused = [], ""
    for broken in (False, True):
        model = sharded()
        optimizer, wire = attached(model, LOSSY)
        train(model, optimizer, range(3))
        if broken:
            state, values = wire.state_dict(), copy.deepcopy(model.state_dict())
            states = _all_of(state)
            model = sharded(seed=5)
            model.load_state_dict(values)
            optimizer, wire = attached(model, LOSSY)
            try:
                wire.load_state_dict(states[dist.get_rank() ^ 1])
            except (ValueError, RanksDisagree) as error:
                refused = str(error)
            wire.load_state_dict(states)
            wire.load_state_dict(wire.state_dict())
        train(model, optimizer, range(3, 6))
        found.append(whole(model))
    mean = wire.mean_state_dict()["mean"]
    wire.load_state_dict(mean)
    again = wire.mean_state_dict()["mean"]
    off = _off(mean, again)
    shapes = {name: tuple(memory.shape) for name, memory in mean["memory"].items()}
    return {"same": torch.equal(*found), "refused": refused, "off": off, "whole": shapes["blocks.1.weight"]}


def _all_of(state: dict[str, Any]) -> list[Any]:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def _off(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two memories, in parts of their largest value."""
    left, right = one["memory"], other["memory"]
    assert left.keys() == right.keys()
    largest = max(float(each.abs().max()) for each in left.values())
    return max(float((left[name] - right[name]).abs().max()) for name in left) / largest


def moved() -> dict[str, Any]:
    """From shards to whole parameters on all ranks, and back."""
    model, plain = sharded(), Blocks()
    optimizer, wire = attached(model, LOSSY)
    train(model, optimizer, range(3))
    theirs = gradwire.attach(plain, None, LOSSY, replicas=dist.group.WORLD)
    theirs.load_state_dict(_all_of(wire.state_dict()))
    out = _off(wire.mean_state_dict()["mean"], theirs.mean_state_dict()["mean"])
    for step in range(2):
        loss_of(plain, step).backward()
    _optimizer, again = attached(sharded(), LOSSY)
    again.load_state_dict(_all_of(theirs.state_dict()))
    back = _off(theirs.mean_state_dict()["mean"], again.mean_state_dict()["mean"])
    return {"out": out, "back": back, "step": again.report().step}


def through_dcp(recipe: str) -> dict[str, Any]:
    """A checkpoint of two replicas; taken up by two, by as many as there are ranks, by one, and unsharded."""
    folder = Path(os.environ[FOLDER], f"dcp {recipe}")
    model = sharded()
    optimizer, wire = attached(model, recipe)
    train(model, optimizer, range(3))
    wire.note_loss(1.0 + dist.get_rank())
    saved, mean = own_state(wire), wire.mean_state_dict()["mean"]
    dcp.save({"wire": WireState(wire)}, checkpoint_id=folder)
    _optimizer, again = attached(sharded(seed=5), recipe)
    dcp.load({"wire": (loaded := WireState(again, folder))}, checkpoint_id=folder)
    found: dict[str, Any] = {"again": _same(own_state(again) | {"why": saved["why"]}, saved)}
    per_node = mesh()["shard"].size()
    found["asked"] = list(loaded.state_dict()) == [f"replica{dist.get_rank() // per_node * per_node}"]
    world = dist.get_world_size()
    for name, shape in (("more", (world, 1)), ("one", (1, world))):
        over = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        other = gradwire.attach(sharded(over["shard"]), None, recipe, replicas=over["replicate"])
        dcp.load({"wire": WireState(other, folder)}, checkpoint_id=folder)
        found[name] = _off(mean, other.mean_state_dict()["mean"])
        found["again"] &= all(own_state(other)[key] == saved[key] for key in ("stepped", "health"))
    flat = gradwire.attach(Blocks(), None, recipe, replicas=dist.group.WORLD)
    dcp.load({"wire": WireState(flat, folder)}, checkpoint_id=folder)
    return {**found, "flat": _off(mean, flat.mean_state_dict()["mean"]), "step": flat.report().step}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, Tensor) else bool(left == right)


def on_a_device(placed: str) -> dict[str, Any]:
    """On a simulated device, on which FSDP has its own streams, and on the CPU."""
    (asked, streamed), streams = PLACES[placed], set[str]()
    device = Simulated() if placed == "host" else Near()

    def note(_parameter: Tensor) -> None:
        streams.add(device.current().name)

    found, reports = [], []
    for there in (True, False):
        with ExitStack() as held:
            if there:
                held.enter_context(device.being(torch.cpu))
                held.enter_context(on(device, streams=streamed))
            model = sharded()
            optimizer, wire = attached(model, LOSSY, placement=asked)
            if there:
                held.enter_context(watched(device, wire))
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(note)
            train(model, optimizer, range(3))
        found.append(whole(model))
        reports.append(wire.report())
    return {
        "races": device.races[:5],
        "streams": list(streams),
        "same": torch.equal(*found),
        "placement": reports[0].placement,
        "steps": [each.step for each in reports],
    }


def deaf(call: str) -> int:
    """How often the reducer's copies race in a training without what `call` orders."""
    device = Simulated(call)
    with device.being(torch.cpu), on(device):
        model = sharded()
        optimizer, wire = attached(model, LOSSY, placement="host")
        ours = next(iter(set(device.streams) - {HOST, DEFAULT}))
        with watched(device, wire):
            train(model, optimizer, range(2))
    return sum(f"on the {ours}" in race for race in device.races)


def dropped() -> dict[str, Any]:
    """Nodes have folders of their own, and the second node's is lost; then both have the first one's."""
    model = sharded()
    optimizer, wire = attached(model, LOSSY)
    train(model, optimizer, range(2))
    node, place = divmod(dist.get_rank(), mesh()["shard"].size())
    kept, mine = (Path(os.environ[FOLDER], f"node {each}") for each in (0, node))
    wire.save(mine)
    states = _all_of(own_state(wire)["memory"])
    _optimizer, again = attached(sharded(), LOSSY)
    loaded = again.load(mine)
    dist.barrier()
    if node:
        for path in mine.iterdir():
            path.unlink(missing_ok=True)
    dist.barrier()
    said = _refusal(lambda: again.load(mine, missing="drop"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is lost
        again.load(kept, missing="drop")  # where both nodes have the first one's files
    return {"loaded": loaded, "said": said, "first node's": _same(own_state(again)["memory"], states[place])}


def changed(before: tuple[int, ...], after: tuple[int, ...]) -> dict[str, Any]:
    """Blocks are frozen or thawed before the model is wrapped anew: what fits of a state goes along."""
    folder = Path(os.environ[FOLDER], f"changed {before} {after}")
    model = sharded(frozen=before)
    optimizer, wire = attached(model, LOSSY)
    train(model, optimizer, range(3))
    own, mean = own_state(wire), wire.mean_state_dict()["mean"]
    states = _all_of(own)
    wire.save(folder / "folder")
    dcp.save({"wire": WireState(wire)}, checkpoint_id=folder / "dcp")
    found: dict[str, Any] = {}
    ways: dict[str, Callable[[gradwire.Wire, Missing], object]] = {
        "own": lambda to, missing: to.load_state_dict(own, missing=missing),
        "all": lambda to, missing: to.load_state_dict(states, missing=missing),
        "mean": lambda to, missing: to.load_state_dict(mean, missing=missing),
        "folder": lambda to, missing: to.load(folder / "folder", missing=missing),
        "dcp": lambda to, missing: dcp.load(
            {"wire": WireState(to, folder / "dcp", missing=missing)}, checkpoint_id=folder / "dcp"
        ),
    }
    for way, load in ways.items():
        again = sharded(frozen=after)
        optimizer, to = attached(again, LOSSY)
        said = _refusal(lambda load=load, to=to: load(to, "refuse"))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            load(to, "drop")
        now, memory = own_state(to)["memory"], own["memory"]
        # A rank reads its own state of DCP only where that has no more parameters than the model.
        is_mean = way == "mean" or (way == "dcp" and before == ())
        now, memory = (to.mean_state_dict()["mean"]["memory"], mean["memory"]) if is_mean else (now, memory)
        fits = now.keys() & memory.keys()
        train(again, optimizer, range(3, 5))
        found[way] = {
            "said": said,
            "warned": [
                str(each.message) for each in warned if "parameters have changed" in str(each.message)
            ],
            "fits": len(fits),
            "same": all(torch.equal(now[name], memory[name]) for name in fits),
            "fresh": sorted(name for name in now.keys() - fits if not now[name].any()),
            "step": to.report().step,
        }
    return found


def flushed() -> dict[str, Any]:
    """What is unsent lands in the sharded gradients."""
    model = sharded()
    optimizer, wire = attached(model, LOSSY)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    wire.flush()
    late = sum(float(p.grad.to_local().abs().sum()) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    return {"late": late > 0, "alike": alike(whole(model))}


def _refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (ValueError, RanksDisagree, FileNotFoundError) as error:
        return str(error)
    return ""


def refused() -> dict[str, str]:
    """Each in its words."""
    between, inside = mesh()["replicate"], mesh()["shard"]
    part = Blocks()
    fully_shard(part.blocks[0], mesh=inside)
    columns = fully_shard(nn.Linear(12, 8), mesh=inside, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    offloaded = fully_shard(nn.Linear(8, 8), mesh=inside, offload_policy=CPUOffloadPolicy(pin_memory=False))
    tensor_parallel = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    parallelize_module(tensor_parallel, inside, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    by_rows = parallelize_module(nn.Linear(8, 12), inside, ColwiseParallel())
    both = nn.Sequential(nn.Linear(8, 12))
    parallelize_module(both, inside, {"0": ColwiseParallel()})
    fully_shard(both, mesh=between)
    ignored = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    parallelize_module(ignored[1], inside, ColwiseParallel())
    fully_shard(ignored, mesh=inside, ignored_params=set(ignored[1].parameters()))
    by_columns = parallelize_module(nn.Linear(12, 8), inside, RowwiseParallel())
    node, place = divmod(dist.get_rank(), per_node := inside.size())
    pairs = [(first, per_node + (first + 1) % per_node) for first in range(per_node)]
    crossed = [dist.new_group(ranks) for ranks in pairs][(place - node) % per_node]
    return {
        "no replicas": _refusal(lambda: gradwire.attach(sharded())),
        "native": _refusal(lambda: gradwire.attach(sharded(mesh()), replicas=between)),
        "replicate": _refusal(
            lambda: gradwire.attach(replicate(nn.Linear(8, 8), mesh=between), replicas=between)
        ),
        "part": _refusal(lambda: gradwire.attach(part, replicas=between)),
        "columns": _refusal(lambda: gradwire.attach(columns, replicas=between)),
        "tensor parallel": _refusal(lambda: gradwire.attach(tensor_parallel, replicas=between)),
        "tensor parallel, by rows": _refusal(lambda: gradwire.attach(by_rows, replicas=between)),
        "tensor parallel, by columns": _refusal(lambda: gradwire.attach(by_columns, replicas=between)),
        "tensor parallel, ignored": _refusal(lambda: gradwire.attach(ignored, replicas=between)),
        "both": _refusal(lambda: gradwire.attach(both, replicas=between)),
        "offload": _refusal(lambda: gradwire.attach(offloaded, replicas=between)),
        "wrong dimension": _refusal(lambda: gradwire.attach(sharded(), replicas=inside)),
        "everyone": _refusal(lambda: gradwire.attach(sharded(), replicas=dist.group.WORLD)),
        "crossed": _refusal(lambda: gradwire.attach(sharded(), replicas=crossed)),
    }


DEAF = ("wait_event", "join")
"""The reducer's copies wait for FSDP's streams, and the optimizer waits for them."""

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

SCENES: dict[str, Callable[[], Any]] = {
    "native": beside_native,
    "native, kept gathered": partial(beside_native, reshard_after_forward=False),
    "native, mixed precision": partial(beside_native, mp_policy=BF16),
    "native, a branch of one node": partial(beside_native, "branched"),
    "native, no_sync": partial(beside_native, "no_sync"),
    "native, set_requires_gradient_sync": partial(beside_native, "FSDP's"),
    **{
        f"learns, {recipe}": partial(learns, recipe)
        for recipe in ("int8", LOSSY, "powersgd", "gcomp", "auto", *OF_SHARDS)
    },
    "checkpointed": partial(checkpointed, False, reshard_after_forward=False),
    "checkpointed, reentrant": partial(checkpointed, True),
    "poisoned, dense": partial(poisoned, "dense"),
    "poisoned, dense, whole": partial(poisoned, "dense", per_node=1),
    "poisoned, lossy": partial(poisoned, LOSSY),
    "failed": failed,
    "resumed": resumed,
    "moved": moved,
    **{f"dcp, {recipe}": partial(through_dcp, recipe) for recipe in (LOSSY, "powersgd", "onebit")},
    "dropped": dropped,
    "frozen": partial(changed, (), (1,)),
    "thawed": partial(changed, (1,), ()),
    **{f"on a device, {placed}": partial(on_a_device, placed) for placed in PLACES},
    **{f"deaf to {call}": partial(deaf, call) for call in DEAF},
    "flushed": flushed,
    "refused": refused,
}
