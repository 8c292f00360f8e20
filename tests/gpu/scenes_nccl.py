"""What ranks do over NCCL that share one GPU; on the CPU the same over gloo, with smaller tensors.

A scene returns its fingerprint, equal on all ranks, under "digest"; what is wrong with it under "wrong",
empty if nothing is; and a figure or a remark under "says".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import recipes
from gradwire._api.configuration import PlacementName
from tests.faults import test_status_vote as status_vote
from tests.gpu import scenes_trained
from tests.process import sharded_models
from tests.support.models import digest, optimizer_of, perceptron, train
from tests.support.recipes import EVERY_RECIPE
from tests.support.where import WHERE

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

NODES = ((0, 1), (2, 3))
PLACE: PlacementName = "device"
DEVICE = torch.device(WHERE.type, 0) if WHERE.type == "cuda" else WHERE
STEPS = 24
CHOSEN_BY = 90
"""Steps in which `auto` has chosen."""

Found = dict[str, Any]


def found(fingerprint: str, says: str = "", wrong: str = "") -> Found:
    return {"digest": fingerprint, "says": says, "wrong": wrong}


def rate() -> Found:
    """Of an all-reduce of torch's own: bytes that leave a rank, each second."""
    x = torch.ones((1 << 18) if WHERE.type == "cpu" else (1 << 26), device=DEVICE)
    times = []
    for _ in range(7):
        start_s = time.perf_counter()
        dist.all_reduce(x)
        float(x[0])
        times.append(time.perf_counter() - start_s)
    world = dist.get_world_size()
    per_s = 2 * (world - 1) / world * x.nbytes / median(times[2:])
    return found("", f"{per_s / 1e9:.2f} GB/s, of {x.nbytes / 2**20:.0f} MiB")


def recipe(text: str, place: PlacementName = PLACE) -> Found:
    """Twenty steps, one of them with NaN on rank 1: it is skipped on all ranks, and all others count."""
    ours = scenes_trained.run(text, DEVICE, place)
    wanted = "stream" if place == "device" and WHERE.type == "cuda" else "host"
    wrong = "" if ours["skipped"] == 1 else f"{ours['skipped']} steps were skipped, and one had NaN"
    if ours["placement"] != wanted:
        wrong = f"gradients were carried by the placement {ours['placement']}"
    return found(ours["digest"], ours["placement"], wrong)


def as_ddp(text: str) -> Found:
    """The parameters of plain DDP, bit for bit."""
    plain, ours = (scenes_trained.run(each, DEVICE, PLACE) for each in (None, text))
    wrong = "" if plain["digest"] == ours["digest"] else "parameters are not those of plain DDP"
    return found(ours["digest"], ours["placement"], wrong)


def adaptive() -> Found:
    """The default, until it has chosen, and some steps after."""
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer)
    losses = train(ddp, optimizer, range(CHOSEN_BY + STEPS))
    return found(digest(ddp), f"chose {wire.report().recipe}", _no_gain(losses))


def _no_gain(losses: list[float]) -> str:
    first, last = (sum(each) / len(each) for each in (losses[:6], losses[-6:]))
    return "" if last < first else f"the loss went from {first:.4f} to {last:.4f}"


def two_levels(text: str) -> Found:
    """Nodes of two ranks."""
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, text, nodes=NODES)
    losses = train(ddp, optimizer, range(STEPS))
    return found(digest(ddp), wire.report().placement, _no_gain(losses))


def replicas() -> Found:
    """A plain module, without DDP."""
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = gradwire.attach(model, optimizer, "int8", replicas=dist.group.WORLD)
    losses = train(model, optimizer, range(STEPS))  # type: ignore[arg-type]
    return found(digest(model), wire.report().placement, _no_gain(losses))


def coded_gathers() -> Found:
    """FSDP2 over all ranks, with its own gathers and scatters in few bits."""
    model = sharded_models.sharded(init_device_mesh(WHERE.type, (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradwire.attach(model, optimizer, "int4", gather="int8")
    losses = sharded_models.train(model, optimizer, range(STEPS))
    return found(_bits_of(sharded_models.whole(model)), "", _no_gain(losses))


def shards_on_nodes() -> Found:
    """FSDP2 inside two nodes, compressed between them."""
    model = sharded_models.sharded()
    optimizer, wire = sharded_models.attached(model, "int8")
    losses = sharded_models.train(model, optimizer, range(STEPS))
    return found(_bits_of(sharded_models.whole(model)), wire.report().placement, _no_gain(losses))


def _bits_of(values: torch.Tensor) -> str:
    return str(int(values.view(torch.int64).sum()))


def rounds() -> Found:
    """Local steps, and a round in every fourth."""
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = gradwire.outer(model, optimizer, "int8", every=4, replicas=dist.group.WORLD)
    losses = train(model, optimizer, range(STEPS))  # type: ignore[arg-type]
    with wire.shared_parameters():
        shared = digest(model)
    wire.detach()
    return found(shared, "", _no_gain(losses))


def raised() -> Found:
    """An encoder raises on one rank: all raise in that step, and train on."""
    seen = status_vote.accident()
    wrong = "" if seen.raised.kind and seen.after == seen.before else f"{seen}"
    return found(seen.digest, f"{seen.raised.kind} after {seen.raised.after_s:.2f} s", wrong)


def not_finite(text: str) -> Found:
    """NaN on one rank: no rank keeps anything of the step, and later ones are as without it."""
    seen = status_vote.not_finite(text)
    as_without = seen.memory_after == seen.memory_before and seen.digest == seen.digest_without
    as_it_should = as_without and seen.skipped == 1 and not seen.finite_gradients
    return found(seen.digest, "", "" if as_it_should else f"{seen}")


def resumed(text: str) -> Found:
    """A run that was saved, and goes on in a new model, has the bits of one that never stopped."""

    def made() -> tuple[DistributedDataParallel, torch.optim.Optimizer, gradwire.Wire]:
        ddp = DistributedDataParallel(perceptron())
        optimizer = optimizer_of(ddp)
        return ddp, optimizer, gradwire.attach(ddp, optimizer, text)

    whole, optimizer, wire = made()
    train(whole, optimizer, range(STEPS))
    parameters = {name: value.clone() for name, value in whole.state_dict().items()}
    residual = wire.state_dict()
    train(whole, optimizer, range(STEPS, 2 * STEPS))
    again, optimizer, wire = made()
    again.load_state_dict(parameters)
    wire.load_state_dict(residual)
    train(again, optimizer, range(STEPS, 2 * STEPS))
    wrong = "" if digest(again) == digest(whole) else "parameters are not those of a run that never stopped"
    return found(digest(again), wire.report().placement, wrong)


def steps() -> Found:
    """The table of steps, and whether all contestants of ours have equal replicas."""
    import gpu_steps

    rows, ways = gpu_steps.table(gpu_steps.matrices, gpu_steps.MATRICES, DEVICE)
    prints = "".join(digest(each.model) for each in ways.values())
    return found(prints, gpu_steps.as_text(rows))


MAIN = ("int8", "int4", "fp8", "topk", "leader_topk", "powersgd", "covap", "bf16", "scalecom")
"""Recipes that stay on the device, one of each kind."""
BY_HOST = ("int8", "topk")


def _stays(text: str) -> bool:
    built = recipes.recipe(text).build()
    return built.exchange.laws.stays_on_device


FIRST: dict[str, Callable[[], Found]] = {
    "rate of an all-reduce": rate,
    "dense has DDP's bits": partial(as_ddp, "dense"),
    "scalecom has DDP's bits in its warm-up": partial(as_ddp, "scalecom(warmup_steps=100)"),
    **{label: partial(recipe, EVERY_RECIPE[label]) for label in MAIN},
    "steps of matrices": steps,
    "auto": adaptive,
    **{f"{label}, by way of the host": partial(recipe, EVERY_RECIPE[label], "host") for label in BY_HOST},
    "FSDP2, gather='int8'": coded_gathers,
    "replicas=": replicas,
    "outer": rounds,
    "NaN on one rank": partial(not_finite, "topk(ratio=0.05)"),
    "an encoder raises on one rank": raised,
    "saved and resumed, int8": partial(resumed, "int8"),
    "saved and resumed, powersgd": partial(resumed, "powersgd(warmup_steps=0)"),
}
"""Of two ranks, what is wanted most first."""
FOUR: dict[str, Callable[[], Found]] = {
    "nodes=, int8": partial(two_levels, "int8"),
    "nodes=, topk": partial(two_levels, "topk(ratio=0.1)"),
    "FSDP2 on two nodes": shards_on_nodes,
    **{f"{label}, four ranks": partial(recipe, EVERY_RECIPE[label]) for label in ("dense", *MAIN)},
    "auto, four ranks": adaptive,
}
"""Of four ranks."""
MORE: dict[str, Callable[[], Found]] = {
    label: partial(recipe, text)
    for label, text in EVERY_RECIPE.items()
    if label not in FIRST and label != "dense" and _stays(text)
}
"""All other recipes that stay on the device, on two ranks."""
SCENES = FIRST | FOUR | MORE
