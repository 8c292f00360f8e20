"""The one line: check everything, agree on it, register the hook."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.checks import check_momentum, check_optimizers, warn_without_optimizer
from gradwire.comm import Comm, ProcessGroupComm
from gradwire.comm.board import Board
from gradwire.comm.groups import (
    borrow,
    borrow_parts,
    carries_cpu,
    give_back,
    given_back_if_refused,
)
from gradwire.configuration import TARGET, Configuration, Place
from gradwire.engine.agree import OptimizerText, require_agreement, require_same_optimizer
from gradwire.engine.calls import Calls
from gradwire.engine.engine import Engine
from gradwire.engine.guard import Guard
from gradwire.engine.layout import Policy, build, is_alone
from gradwire.engine.preparing import prepare_for
from gradwire.engine.shards import Shard
from gradwire.engine.surroundings import Surroundings
from gradwire.engine.worker import Worker
from gradwire.errors import RanksDisagree
from gradwire.moment import Replicas, Replicated, read_by
from gradwire.placement import Bringing, Device, device_at, host
from gradwire.recipes import Composition, Recipe
from gradwire.sources import source_of
from gradwire.sources.backward import Backward, Hear
from gradwire.sources.nodes.level import NodeLevel
from gradwire.sources.nodes.members import Nodes, Table, agreed, kind_of, neighbours
from gradwire.sources.source import Source
from gradwire.tools.diagnose import Watch
from gradwire.unwrapping import Optimizers, optimizers_of, scaler_of
from gradwire.wire import Attached, Wire

_LOG = logging.getLogger("gradwire")
_UNTRIED = (
    "gradients on %s are carried by way of the host. That is experimental: it has run on a simulated device "
    "only. Compare with plain training before you rely on it"
)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    recipe: str | Recipe | Composition = "auto",
    *,
    policy: Policy | None = None,
    scaler: torch.amp.GradScaler | None = None,
    target: float = TARGET,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    nodes: Nodes = "auto",
    memory_dtype: torch.dtype | None = None,
    placement: Place = "auto",
    checksums: bool = False,
    guard_every: int = 0,
) -> Wire:
    """Let gradwire carry the gradients of `model`. A collective over the ranks of its process group.

    `model` is a `DistributedDataParallel`, or a wrapper around one: `torch.compile`'s, or Fabric's. With
    `replicas=` it is a module that nothing wraps (`docs/sources.md`).

    Buffers (BatchNorm's statistics) come along, unless DDP has `broadcast_buffers=False`: rank 0's travel
    under the backward pass, where DDP would broadcast them before the next forward pass (`docs/training.md`).

    - `optimizer`: one or several, plain or as frameworks wrap them. Watched, to warn when several backward
      passes precede one step; `gcomp` goes by it, and recipes that apply momentum (`dgc`, `signum`) check it.
    - `recipe`: `name`, `name(key=value, …)`, or a `Composition` with a text; see `gradwire.recipes.names()`.
      On a single rank it compresses nothing, as nothing is sent; `dgc`, `signum` and `signsgd(scale="none")`,
      which do more, go on.
    - `policy`: another recipe for some parameters: glob patterns over names, or a function of the
      parameter; by default vectors and tiny tensors travel densely beside a lossy recipe. That is
      `gradwire.by_size()`; `gradwire.by_size(smallest=16384)` spares larger ones, too.
    - `scaler`: the `GradScaler` in use, so that memory stays free of the loss scale. Accelerate's is found.
    - `target`: for "auto" only, the share of the no-communication speed of backward at which it is content.
    - `seed`: of all random choices, equal on all ranks.
    - `process_group`: by default one over the same ranks that gradwire alone uses, for one model at a time.
    - `replicas`: for a plain module, the ranks over which gradients are averaged: a process group, such as
      `torch.distributed.group.WORLD`, or a mesh dimension. All begin with rank 0's parameters and buffers.
    - `nodes`: which ranks share a node: a list of each node's ranks or process group, or a `DeviceMesh` of
      nodes by ranks. They add up gradients among themselves; shards of the sums travel between nodes by the
      recipe (`docs/nodes.md`). "auto" goes by `LOCAL_WORLD_SIZE`, which torchrun sets; with one node,
      one rank per node, or nodes that differ in size, it changes nothing. `None` knows no nodes.
    - `memory_dtype`: `torch.bfloat16` keeps what is unsent in half the space; what that rounds off is lost.
    - `placement`: where memory and codecs are, if gradients are not on the CPU. "host" copies them to pinned
      memory and the means back, and sends over gloo, whatever the model's own group is. "device" is not there
      yet, and "auto" is "host". On the CPU nothing is copied.
    - `checksums`: everything that gradwire sends carries a checksum (`docs/reliability.md`). Where bytes come
      damaged, `backward()` raises on all ranks, and the memory stays as it was. All-reduces then go by hops
      of gradwire's own. Not with `placement="device"` on NCCL.
    - `guard_every`: every `guard_every` steps, compare a checksum of the parameters over ranks; 0 is never.
      Where they differ, `backward()` raises `RanksDisagree` with step, parameters and ranks.

    Raises `ValueError` when something is configured wrongly, and `RanksDisagree`, on all ranks, when they
    differ in recipe, policy, seed, version, device, the names, shapes and dtypes of parameters, buffers, or
    the optimizers' types, groups and options. Options that are tensors are not compared, nor their state.

    Example::

        ddp = DistributedDataParallel(model)
        wire = gradwire.attach(ddp, optimizer)
    """
    if not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    source = source_of(model, replicas)
    scaler = scaler or scaler_of(optimizer)
    nodes = list(nodes) if isinstance(nodes, Iterable) and not isinstance(nodes, str) else nodes
    asked = Configuration(
        recipe, target, policy, scaler, seed, memory_dtype, placement, nodes, guard_every, checksums
    )
    device = device_at(source.device)
    on_host = device.where.type == "cpu"
    if process_group is None:
        group = borrow(source.group, beside=None if on_host else source.device)
    else:
        group = _same_ranks(process_group, source.group, on_host)
    comm = ProcessGroupComm(group)
    with given_back_if_refused(group):
        mine = partial(neighbours, nodes, dist.get_process_group_ranks(group), comm.rank)
        chosen, optimizers = _agreed_recipe(asked, source, optimizer, comm, device.where, also=mine)
        require_agreement(asked.fingerprint(chosen, source, device.where), comm)
        require_same_optimizer(OptimizerText.of(optimizers), comm)
        parts = _parts(source, comm)
        if source.members is None and nodes is not None:
            parts = _on_nodes(nodes, agreed(kind_of(nodes), mine(), comm), comm)
    if not on_host and comm.rank == 0:
        _LOG.warning(_UNTRIED, device.where.type)
    return _assemble(asked, chosen, source, optimizers, comm, parts, device)


def _split(everyone: ProcessGroupComm, *members: Sequence[int]) -> tuple[ProcessGroupComm, ...]:
    """A comm over each of `members`. Raises `ValueError` on all ranks where torch cannot make the groups."""
    groups = borrow_parts(everyone.group, *members)
    if groups is None:
        raise ValueError(
            "ranks are in different numbers of process groups, so torch cannot make one per node; create "
            "groups of some ranks only after attaching"
        )
    return tuple(ProcessGroupComm(each) for each in groups)


def _on_nodes(nodes: Nodes, table: Table | None, everyone: ProcessGroupComm) -> tuple[ProcessGroupComm, ...]:
    """The comm inside this rank's node, and the one between nodes; none in a flat world."""
    if table is None:
        return ()
    try:
        return _split(everyone, table.inside(everyone.rank), table.between(everyone.rank))
    except ValueError as error:
        if kind_of(nodes) == "given":
            raise
        _LOG.warning("%s: gradients go between all ranks alike", error)
        return ()


def _parts(source: Source, everyone: ProcessGroupComm) -> tuple[ProcessGroupComm, ...]:
    """Where ranks hold shards, the comm inside this rank's replica, and the one between replicas.

    A collective. Raises `ValueError`, on all ranks, where ranks of one shard do not agree on which it is.
    """
    if (members := source.members) is None:
        return ()
    inside, between = members
    shape = f"{len(inside)} ranks in each of {len(between)} replicas"
    require_agreement({"shards": shape}, everyone)
    mine = torch.tensor([list(inside).index(everyone.rank), *between], device="cpu")
    table = torch.empty(everyone.world, mine.numel(), dtype=mine.dtype, device="cpu")
    everyone.all_gather(table, mine).wait()
    if any(len(set(table[row[1:], 0].tolist())) > 1 for row in table):
        raise ValueError(
            "replicas= joins ranks with different shards: it must hold the ranks that have the same place in "
            "fully_shard's meshes"
        )
    return _split(everyone, *members)


def _assemble(
    asked: Configuration,
    chosen: Recipe,
    source: Source,
    optimizers: Optimizers,
    everyone: ProcessGroupComm,
    parts: tuple[ProcessGroupComm, ...],
    device: Device,
) -> Wire:
    def ended() -> None:
        for each in (everyone, *parts):
            each.close()
            if backward.is_sound and worker.is_connected:
                give_back(each.group)

    worker = Worker(crashed=lambda error: backward.engine.crash(error), ended=ended)
    decision = chosen.build().next
    uses: dict[str, float] = {}
    level, replicas = None, source.replicas_of(optimizers)
    carry = _carriers(everyone, *parts, checksums=asked.checksums)
    control, comm, between = carry[0], carry[-1], (everyone, *parts)[-1]
    shard = Shard(carry[1]) if parts else None
    if shard is not None and source.members is None:
        level = NodeLevel(shard, source.specs, worker.post)
        replicas = shard.replicas(replicas, source.specs)
    placement = host(comm, worker.post, device, control=control)
    around = Surroundings(
        placement,
        policy=asked.policy,
        seed=asked.seed,
        memory_dtype=asked.memory_dtype,
        alone=is_alone(comm),
        loss_scale=_scale_of(asked.scaler, placement.bringing),
        replicas=read_by(placement.bringing.read, partial(_landing, placement.bringing, replicas)),
        uses=lambda: uses,
        shard=shard,
        buffers=source.passenger,
        check=partial(check_momentum, optimizers=optimizers),
        prepare=partial(prepare_for, rank=everyone.rank),
        link_seen=lambda link: None if link is None else between.expect(link.beta_s),
        guard=Guard(
            {spec.name: source.parameters[spec.name] for spec in source.specs},
            asked.guard_every,
            source.is_uneven,
        ),
        inspect=(watch := Watch()),
    )
    specs = source.specs if level is None else level.specs

    def engine(concluded: Hear, resolved: Hear) -> Engine:
        return Engine(specs, chosen, replace(around, concluded=concluded, resolved=resolved))

    calls = Calls(Board.of(everyone.group) if everyone.world > 1 else None)
    backward = Backward(source, worker, engine, calls, level)
    # At exit too: the thread must not outlive the interpreter's C++ side.
    weakref.finalize(source.model, worker.stop)
    counted = uses if decision is not None and decision.uses else None
    source.begin(backward, optimizers, counted, scaled=asked.scaler is not None)
    backward.news.attached()
    return Wire(Attached(source.model, source, backward, optimizers, asked.scaler, watch, worker))


def _carriers(*comms: ProcessGroupComm, checksums: bool) -> Sequence[Comm]:
    """What carries the messages of each of `comms`."""
    if not checksums:
        return comms
    from gradwire.comm.checked import CheckedComm

    return [CheckedComm(each) for each in comms]


def _landing(bringing: Bringing, replicas: Replicas, name: str) -> Replicated | None:
    """`replicas(name)`, of which what is cut or filled up is made in the stream that it is read in."""
    with bringing.landing():
        return replicas(name)


def _scale_of(scaler: torch.amp.GradScaler | None, bringing: Bringing) -> Callable[[], float]:
    """For the engine's thread, once gradients have been brought."""
    if scaler is None:
        return lambda: 1.0

    def scale() -> float:
        # It waits for a stream, and in that of the computation it would wait for the whole backward pass.
        with bringing.landing():
            return scaler.get_scale()

    return scale


def _agreed_recipe(
    asked: Configuration,
    source: Source,
    optimizer: object,
    comm: Comm,
    device: torch.device,
    also: Callable[[], object],
) -> tuple[Recipe, Optimizers]:
    """Parse, try out, describe; a rank that must refuse tells the others first, which would wait for it."""
    refusal: Exception | None = None
    try:
        source.check()
        optimizers = optimizers_of(optimizer)
        check_optimizers(optimizers, source.module)
        chosen = asked.validated(source, device)
        layout = build(source.specs, chosen.build(), asked.policy, torch.device("meta"))
        check_momentum(layout, optimizers)
        warn_without_optimizer(layout, optimizers)
        also()
        OptimizerText.of(optimizers)  # which may raise, so not first where all ranks go on
    except Exception as error:  # a policy of the user's, or a warning made an error: peers must hear of it
        refusal = error
    fields = {"the configuration": "accepted" if refusal is None else f"refused, {refusal}"}
    try:
        require_agreement(fields, comm)
    except RanksDisagree:
        if refusal is None:
            raise
    if refusal is not None:
        raise refusal
    return chosen, optimizers


def _same_ranks(group: dist.ProcessGroup, models: dist.ProcessGroup, on_host: bool) -> dist.ProcessGroup:
    mine, theirs = dist.get_process_group_ranks(group), dist.get_process_group_ranks(models)
    if mine != theirs:
        raise ValueError(f"process_group has ranks {mine}, the model's has {theirs}; they must be the same")
    if group is models:
        raise ValueError(
            "process_group is the model's own: its collectives and gradwire's would mix. Create another "
            "with torch.distributed.new_group, or leave it out"
        )
    if not on_host and not carries_cpu(group):
        raise ValueError(
            "process_group carries no tensors on the CPU, where gradients are copied to: create one with "
            "torch.distributed.new_group(backend='gloo'), or leave it out"
        )
    return group
