"""Scenes of two nodes of two ranks: ranks of a node add up first, shards travel between nodes."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comm.checksums import SHORT_BYTES, SealedLayout
from gradwire.errors import PeerFailed, RanksDisagree, TransportError, WireError
from gradwire.integrations.dcp import WireState
from gradwire.sources.nodes.level import Packing
from tests.faults.scenes_ranks import Made, ddp, hsdp, plain
from tests.support.models import batch, digest, gradients, optimizer_of, perceptron, train
from tests.support.ranks import FOLDER, TIMEOUT_S
from tests.support.states import own_state

NODES = ((0, 1), (2, 3))
RECIPES = ("dense", "int8", "topk(ratio=0.05)", "powersgd(rank=2)", "auto")


def _attached(recipe: str, nodes: Any = NODES, **options: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02, **options)
    optimizer = optimizer_of(ddp, lr=0.2)
    return ddp, optimizer, gradwire.attach(ddp, optimizer, recipe, nodes=nodes)


def dense_is_dense() -> dict[str, float]:
    """The largest difference between the gradients of one step, flat and on two levels; their largest."""
    found = []
    for nodes in (None, NODES):
        ddp, optimizer, _wire = _attached("dense", nodes)
        train(ddp, optimizer, range(1))
        found.append(torch.cat([gradient.view(-1) for gradient in gradients(ddp)]))
    return {"apart": float((found[0] - found[1]).abs().max()), "largest": float(found[0].abs().max())}


def learns(recipe: str) -> dict[str, Any]:
    """Forty steps."""
    ddp, optimizer, wire = _attached(recipe)
    losses = train(ddp, optimizer, range(40))
    report = wire.report()
    return {
        "first": sum(losses[:10]) / 10,
        "last": sum(losses[-10:]) / 10,
        "digest": digest(ddp),
        "step": report.step,
        "world": (report.world, report.per_node),
        "sent": (report.wire_bytes_per_step, report.metered_bytes_per_step),
        "inside": report.inside_bytes_per_step,
        "memory": report.memory_bytes,
        "text": str(report),
    }


def not_finite(recipe: str) -> dict[str, Any]:
    """Three steps, of which the second has a NaN on one rank."""
    ddp, optimizer, wire = _attached(recipe)
    finite = []
    for step in range(3):
        inputs, targets = batch(step)
        if step == 1 and dist.get_rank() == 3:
            targets[0, 0] = torch.nan
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        finite.append(all(bool(each.isfinite().all()) for each in gradients(ddp)))
        if finite[-1]:
            optimizer.step()
    report = wire.report()
    return {"finite": finite, "step": report.step, "skipped": report.skipped_steps, "digest": digest(ddp)}


def damaged(made: Callable[..., Made]) -> dict[str, Any]:
    """A flipped bit in each long message that rank 3 receives in a step, for every source; one more step."""
    model, optimizer, wire = made("topk(ratio=0.5)", checksums=True)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()

    def seen(action: Callable[[], object]) -> list[str]:
        if dist.get_rank() == 3:
            SealedLayout.open = struck  # type: ignore[method-assign]
        try:
            action()
        except (WireError, PeerFailed) as raised:
            return [type(raised).__name__, str(raised)]
        finally:
            SealedLayout.open = honest  # type: ignore[method-assign]
        return ["nothing", ""]

    for step in range(2):
        backward(step)
        optimizer.step()
    before, honest = own_state(wire)["memory"], SealedLayout.open

    def struck(how: SealedLayout, message: Tensor, *arguments: Any) -> tuple[bool, bool]:
        message[0] ^= how.payload_bytes > SHORT_BYTES
        return honest(how, message, *arguments)

    error, after = seen(partial(backward, 2)), own_state(wire)["memory"]
    intact = all(torch.equal(before[name], after[name]) for name in before)
    wire.watching = True
    backward(3)
    diagnosed = [seen(wire.diagnose)[0], wire.diagnose().step]
    optimizer.step()
    return {
        "error": error,
        "intact": intact,
        "diagnosed": diagnosed,
        "step": wire.report().step,
    }


def without_room() -> dict[str, list[Any]]:
    """Rank 1 has no room for what it gets or sends inside its node, in a short message and in a long one."""
    found = {}
    for size in (16, 512):  # gloo's own all-to-all, or messages
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(size, size))
        optimizer = optimizer_of(ddp)
        gradwire.attach(ddp, optimizer, "int8", nodes=NODES)
        for name in ("rows", "pack"):
            errors = []
            for fails in (False, True, False):
                with mock.patch.object(Packing, name, _failing_once(name, fails and dist.get_rank() == 1)):
                    errors.append(_error_in_a_step(ddp, size))
            found[f"{name}, {size}"] = [*errors, digest(ddp)]
    return found


def _failing_once(name: str, fails: bool) -> Callable[..., Any]:
    honest, left = getattr(Packing, name), [MemoryError("no room")] * fails

    def packed(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return honest(*arguments)

    return packed


def _error_in_a_step(ddp: nn.Module, size: int) -> str:
    drawn = torch.randn(4, size, generator=torch.Generator().manual_seed(dist.get_rank()))
    optimizer = optimizer_of(ddp, lr=0.01)
    optimizer.zero_grad()
    try:
        ddp(drawn).square().mean().backward()
    except (PeerFailed, MemoryError) as error:
        return type(error).__name__
    optimizer.step()
    return ""


def buffers_travel() -> bool:
    """Whether all ranks have rank 0's statistics after a backward pass."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)))
    gradwire.attach(ddp, optimizer_of(ddp), "int8", nodes=NODES)
    for step in range(3):
        ddp(
            torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        ).sum().backward()
    mine = ddp.module[1].running_mean.clone()
    first = mine.clone()
    dist.broadcast(first, 0)
    return torch.equal(mine, first) and bool(mine.any())


def state_moves() -> dict[str, bool]:
    """Own states resume bit for bit; the mean moves to a flat world and back."""
    ddp, optimizer, wire = _attached("topk(ratio=0.05)")
    train(ddp, optimizer, range(3))
    own, mean = wire.state_dict(), wire.mean_state_dict()["mean"]
    model = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    train(ddp, optimizer, range(3, 6))
    found = {}
    again, optimizer, wire = _attached("topk(ratio=0.05)")
    again.module.load_state_dict(model)
    wire.load_state_dict(own)
    train(again, optimizer, range(3, 6))
    found["own"] = digest(again) == digest(ddp)
    _ddp, _optimizer, flat = _attached("topk(ratio=0.05)", None)
    flat.load_state_dict(mean)
    there = flat.mean_state_dict()["mean"]
    found["to flat"] = all(torch.equal(there["memory"][name], each) for name, each in mean["memory"].items())
    place = Path(os.environ[FOLDER], "dcp")
    dcp.save({"wire": WireState(wire)}, checkpoint_id=place)
    before = own_state(wire)["memory"]
    for name, nodes in (("own by DCP", NODES), ("to flat by DCP", None)):
        _ddp, _optimizer, other = _attached("topk(ratio=0.05)", nodes)
        dcp.load({"wire": WireState(other, place)}, checkpoint_id=place)
        left, right = (
            (own_state(other)["memory"], before)
            if nodes
            else (other.mean_state_dict()["mean"]["memory"], wire.mean_state_dict()["mean"]["memory"])
        )
        found[name] = all(torch.equal(left[key], each) for key, each in right.items())
    _ddp, _optimizer, back = _attached("topk(ratio=0.05)", [[0, 2], [1, 3]])
    back.load_state_dict(there)
    here = back.mean_state_dict()["mean"]
    found["back"] = all(torch.equal(here["memory"][name], each) for name, each in mean["memory"].items())
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    step = back.save(folder[0])
    dist.barrier()  # a rank returns once all are ready, and its file has its last name a little later
    found["one file per rank"] = len(list(Path(folder[0]).glob("*.pt"))) == dist.get_world_size()
    # The mean over other nodes: the states are added up in another order, of numbers below 1.
    for name, nodes in (("own files", [[0, 2], [1, 3]]), ("other nodes", NODES), ("no nodes", None)):
        _ddp, _optimizer, other = _attached("topk(ratio=0.05)", nodes)
        loaded, memory = other.load(folder[0]), other.mean_state_dict()["mean"]["memory"]
        close = all(torch.allclose(memory[key], each, atol=1e-6) for key, each in here["memory"].items())
        found[name] = loaded == step and close
    return found


def handed_over() -> dict[str, Any]:
    """A flush brings the mean unsent to all ranks alike, and after `detach` training goes on."""
    ddp, optimizer, wire = _attached("topk(ratio=0.05)")
    wire.watching = True
    train(ddp, optimizer, range(3))
    diagnosis = wire.diagnose()
    unsent = wire.mean_state_dict()["mean"]["memory"]
    optimizer.zero_grad()
    wire.flush()
    given = {name: p.grad for name, p in ddp.module.named_parameters() if p.grad is not None}
    flushed = all(torch.allclose(given[name], each, rtol=1e-6, atol=1e-8) for name, each in unsent.items())
    wire.detach()
    train(ddp, optimizer, range(2))
    return {"flushed": flushed, "some": len(unsent), "digest": digest(ddp), "diagnosis": str(diagnosis)}


@contextmanager
def _environment(name: str, text: str | None) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if text is not None:
        os.environ[name] = text
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def left_flat() -> dict[str, int]:
    """How many ranks of a node add up first where "auto" finds two, by recipe; and where nodes are given.

    Without biases, which are summed by all ranks, and gain by two levels however few they are.
    """
    few, found = "topk(ratio=0.001)", {}
    for name, recipe, nodes in (("dense", "dense", "auto"), (few, few, "auto"), ("given", few, NODES)):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
        ddp = DistributedDataParallel(model)
        with _environment("LOCAL_WORLD_SIZE", "2"):
            found[name] = (
                gradwire.attach(ddp, optimizer_of(ddp, lr=0.2), recipe, nodes=nodes).report().per_node
            )
    return found


def found_nodes() -> dict[str, Any]:
    """How many ranks per node "auto" finds, by what launchers say, and its warnings, also of a switch."""
    uneven = "3" if dist.get_rank() < 3 else "1"
    said = {"none": None, "2": "2", "4": "4", "uneven": uneven, "no number": "two"}
    asked = [(name, text, "auto") for name, text in said.items()]
    log, found = _Lines(), {}
    logger = logging.getLogger("gradwire")
    logger.addHandler(log)
    for name, text, nodes in (*asked, ("uneven, asked to be flat", uneven, None)):
        log.lines.clear()
        with _environment("LOCAL_WORLD_SIZE", text):
            _ddp, _optimizer, wire = _attached("int8", nodes)
            wire.switch("int4")
        found[name] = wire.report().per_node, [line for line in log.lines if "not added up inside" in line]
    logger.removeHandler(log)
    return found


def told_in_other_ways() -> dict[str, int]:
    """Groups, and a mesh of nodes by ranks; ranks that can be read once, and an array of them."""
    ways = {
        "groups": [dist.new_group(list(each)) for each in NODES],
        "mesh": dist.init_device_mesh("cpu", (2, 2)),
        "across": [[0, 3], [2, 1]],
        "generators": (iter(each) for each in NODES),
        "array": torch.tensor(NODES).numpy(),
    }
    return {name: _attached("int8", nodes)[2].report().per_node for name, nodes in ways.items()}


def refused() -> dict[str, list[str]]:
    """What is raised, on every rank."""
    rank, wrong = dist.get_rank(), {}
    wrong["not alike"] = "auto" if rank == 0 else NODES
    wrong["contradictory"] = NODES if rank < 2 else [[0, 2], [1, 3]]
    wrong["uneven"] = [[0, 1, 2], [3]]
    wrong["without one"] = [[0, 1], [2]] if rank == 3 else NODES
    wrong["no such rank"] = [[0, 1], [2, 3, 9]]
    wrong["a word"] = "two"
    wrong["a number"] = 2
    wrong["ranks alone"] = [0, 1, 2, 3]
    found = {}
    for name, nodes in wrong.items():
        try:
            _attached("int8", nodes)
        except (ValueError, RanksDisagree) as error:
            found[name] = [type(error).__name__, str(error)]
    return found


def unconnected() -> list[Any]:
    """Rank 1 makes a group with the other rank of its node, and then hears that it could not: what is raised,
    and how many groups the next model makes, which ignores nodes.
    """
    # With a timeout of its own, so that groups of other scenes do not serve, nor the one that is left.
    group, new_group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S - 1)), dist.new_group

    def new(ranks: Sequence[int], **options: Any) -> Any:
        made = new_group(ranks, **options)
        if dist.get_rank() == 1 and len(ranks) == 2:
            raise RuntimeError("connectFullMesh failed")
        return made

    said = ["attached", ""]
    with mock.patch("torch.distributed.new_group", new):
        try:
            _attached("int8", process_group=group)
        except TransportError as error:
            said = [str(error), type(error.__cause__).__name__]
    made = len(dist.distributed_c10d._world.pg_map)
    ddp, optimizer, _wire = _attached("int8", None, process_group=group)
    train(ddp, optimizer, range(1))
    return [*said, len(dist.distributed_c10d._world.pg_map) - made]


def groups_are_lent_again() -> bool:
    """A model that has gone leaves its three groups to the next one."""

    def groups() -> set[str]:
        _ddp, _optimizer, wire = _attached("int8")
        reducer = wire.attached.backward.reducer
        shard = reducer.shard
        assert shard is not None
        return {each.group.group_name for each in (reducer.comm, reducer.env.control, shard.inside)}

    first = groups()
    return len(first) == 3 and groups() == first


def uneven_batches() -> str:
    """Under `join()`, with one batch more on every second rank."""
    ddp, optimizer, _wire = _attached("int8", find_unused_parameters=True)
    rank = dist.get_rank()
    with ddp.join():
        train(ddp, optimizer, range(3 + rank % 2))
    return digest(ddp)


SCENES: dict[str, Callable[[], Any]] = {
    "unconnected": unconnected,  # first of all: later ranks are in different numbers of groups
    "dense is dense": dense_is_dense,
    **{recipe: partial(learns, recipe) for recipe in RECIPES},
    **{f"NaN, {recipe}": partial(not_finite, recipe) for recipe in ("dense", "int8", "topk(ratio=0.05)")},
    "damaged, nodes": partial(damaged, partial(ddp, nodes=NODES)),
    "damaged, plain": partial(damaged, plain),
    "damaged, hsdp": partial(damaged, hsdp),
    "without room": without_room,
    "buffers": buffers_travel,
    "state": state_moves,
    "handed over": handed_over,
    "auto finds": found_nodes,
    "left flat": left_flat,
    "other ways": told_in_other_ways,
    "refused": refused,
    "lent": groups_are_lent_again,
    "uneven": uneven_batches,
}
