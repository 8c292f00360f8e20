"""`attach`: check the arguments, agree on them over all ranks, register the hook."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire._api.configuration import TARGET, Configuration, Gathered, HeldOn, PlacementName
from gradwire._api.connections import connect_more
from gradwire._api.parts import Attached, OwnGradients, OwnRanks, Steps, Watch
from gradwire._api.prepare import PreparedBeside, awaited, prepare_for
from gradwire._api.transports import Transports, connect, placements, with_parts, with_streams
from gradwire._api.wire import Wire
from gradwire.agreement.agree import (
    OptimizerText,
    is_the_same,
    require_accepted,
    require_agreement,
    require_same_optimizer,
)
from gradwire.agreement.board import Board
from gradwire.agreement.calls import Calls
from gradwire.arguments import as_python
from gradwire.comm import Comm, ProcessGroupComm, gathered
from gradwire.comm.apart import Lending
from gradwire.comm.groups import give_back, given_back_if_refused
from gradwire.control.controller import controller_for
from gradwire.environment import timed_every
from gradwire.exchange.captured import Captures
from gradwire.kernels import compiler
from gradwire.kernels.slices import computes_elsewhere
from gradwire.placement import BufferTransfer, device_at
from gradwire.recipes import Composition, Recipe
from gradwire.recipes.parse import short
from gradwire.sources import source_of
from gradwire.sources.carried import claim
from gradwire.sources.checks import check_optimizers, warn_without_optimizer
from gradwire.sources.nodes.level import NodeReducer
from gradwire.sources.nodes.members import Nodes, NodeTable, agreed, kind_of, neighbours
from gradwire.sources.observe import LossScale, hold
from gradwire.sources.source import Source
from gradwire.sources.unwrap import Optimizers, listed, optimizers_of, scaler_of, sharded_in
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.layout import Policy, build, is_alone
from gradwire.step.on_device import DeviceBackward
from gradwire.step.optimizer_log import OptimizerLog, SkippedStep
from gradwire.step.reducer import Backward, Reducer
from gradwire.step.shards import Shard
from gradwire.step.step import Step
from gradwire.step.worker import Worker
from gradwire.tools.guard import Guard
from gradwire.unit.context import Replicas, Replicated, read_by

_LOG = logging.getLogger("gradwire")
_FLAT = (
    "%s: gradients are not added up inside nodes first, so more bytes travel between nodes. Two levels need "
    "as many ranks on every node. nodes=None asks for the same, without this warning"
)

_NO_GRAPHS = "cuda_graphs=True changes nothing here: %s has no graphs that gradwire captures"


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
    placement: PlacementName = "auto",
    checksums: bool = False,
    guard_every: int = 0,
    skipped: SkippedStep = "drop",
    inside: str | Recipe | None = None,
    gather: Gathered = None,
    held_on: HeldOn = "device",
    cuda_graphs: bool = False,
) -> Wire:
    """Let gradwire carry the gradients of `model`. A collective over the ranks of its process group.

    `model` is a `DistributedDataParallel`, or a wrapper around one: `torch.compile`'s, or Fabric's. With
    `replicas=` it is a module without a wrapper (`docs/where-it-runs.md`). After `fully_shard` and without
    `replicas=` it is FSDP2's own traffic that gradwire carries (`docs/fsdp2.md`).

    gradwire also sends rank 0's buffers (BatchNorm's statistics), unless DDP has `broadcast_buffers=False`.
    They travel during the backward pass. DDP would broadcast them before the next forward pass
    (`docs/training.md`).

    If some rank's machine has not compiled the kernels yet, another process compiles them there, and
    gradients travel uncompressed until all ranks have theirs. `gradwire warmup` compiles beforehand.

    - `optimizer`: one or several, plain or as frameworks wrap them. Its steps are what gradwire counts: a
      gradient that it never uses leaves no trace. `gcomp` reads its state, and recipes that apply momentum
      (`dgc`, `signum`) check it.
    - `recipe`: `name`, `name(key=value, …)`, or a `Composition` with a text; see `gradwire.recipes.names()`.
      On a single rank nothing is sent, so nothing is compressed. `dgc`, `signum` and `signsgd(scale="none")`
      run all the same, because they do more than compress.
    - `policy`: other recipes for some parameters, by glob patterns over names or by a function of the
      parameter. The default is `gradwire.by_size()`: beside a lossy recipe, vectors and tiny tensors travel
      densely. `gradwire.by_size(smallest=16384)` spares larger tensors, too. A function is asked about each
      parameter here, and not again.
    - `scaler`: your `GradScaler`. Required with float16 autocast: unsent gradient is stored unscaled.
      Accelerate's is found.
    - `target`: for "auto" only. It compresses no further once it expects this share of the no-communication
      speed.
    - `seed`: the seed of all random choices. It must be equal on all ranks.
    - `process_group`: the group over which gradwire sends. By default it makes one over the same ranks, and
      uses it for one model at a time.
    - `replicas`: for a plain module, the ranks over which gradients are averaged: a process group, such as
      `torch.distributed.group.WORLD`, or a mesh dimension. All ranks begin with the parameters and buffers of
      rank 0. A single rank can leave it out.
    - `nodes`: which ranks share a node: a list of each node's ranks or process group, or a `DeviceMesh` of
      nodes by ranks. The ranks of a node add up their gradients first. Then shards of the sums travel between
      nodes by the recipe (`docs/where-it-runs.md`). "auto" reads `LOCAL_WORLD_SIZE`, which torchrun sets. It
      changes nothing with one node, one rank per node, or nodes that differ in size, of which a warning in
      the log tells. It also changes nothing if the recipe sends so little that adding up first would cost
      more. `None` ignores nodes.
    - `memory_dtype`: `torch.bfloat16` keeps unsent gradient in half the space; the rounding errors are lost.
    - `placement`: where memory and codecs are, if gradients are not on the CPU. "host" copies gradients to
      pinned memory and means back, and sends over gloo, whatever the model's own group is. "device" leaves
      them on the device: over NCCL nothing comes to the host, over gloo only payloads do. A recipe that reads
      numbers on the host still runs there, and a warning says so. "auto" is the same rule. It follows from
      the recipe alone, whenever one is installed, and no measured time changes it. Gradients on the CPU are
      never copied.
    - `checksums`: every message that gradwire sends carries a checksum (`docs/training.md`). If bytes arrive
      damaged, `backward()` raises on all ranks, and the memory stays as it was. All-reduces then run as
      gradwire's own messages, hop by hop. It cannot be used with `placement="device"` on NCCL.
    - `guard_every`: every `guard_every` steps, compare a checksum of the parameters over ranks; 0 means
      never. If they differ, `backward()` raises `RanksDisagree` with step, parameters and ranks. If the
      optimizer steps with gradients that were never exchanged, that raises `GradwireError`.
      With `gather="exact"` it is what is held that is compared, after as many gathers with changes; if that
      differs, a warning says so and parameters are sent as they are.
    - `skipped`: the meaning of gradients that are cleared before their optimizer has stepped. "drop": the
      step is left out, and the memory goes back to what it was before. "keep": the gradients were used in a
      way that gradwire does not see, such as a sum in buffers of your own. Nothing is dropped before the
      optimizer's first step, inside `step(closure)`, and under `join()`.
    - `gather`: after `fully_shard`, the bits in which FSDP2 gathers parameters: "bf16" or "int8". Masters
      stay exact. `None` gathers them as they are. "exact" is for `param_dtype=torch.bfloat16` or float16: it
      sends what has changed since the last gather, and loses nothing (`docs/fsdp2.md`).
    - `held_on`: for `gather="exact"`, where gathered parameters are held: "device", or "host", which keeps
      nothing in the device's memory and copies them there in each gather.
    - `cuda_graphs`: capture the kernels of `topk`, `leader_topk`, `scalecom`, `powersgd` and `acpsgd`
      between collectives in CUDA graphs, and launch each graph as one. Collectives stay as they are, and so
      do the bits. All other recipes, other devices, and steps that are timed or looked at run as without it
      (`docs/gpus.md`). Ranks may differ in it. It has not run on a GPU yet.
    - `inside`: after `fully_shard` and with `replicas=`, the recipe of FSDP2's own scatters.

    Raises `ValueError` if an argument is wrong. Raises `RanksDisagree`, on all ranks, if they differ in
    recipe, policy, seed, version, device, the names, shapes and dtypes of parameters and buffers, or the
    optimizers' types, groups and options. Options that are tensors are not compared, and neither is the
    optimizers' state.

    Example::

        model = DistributedDataParallel(module)
        wire = gradwire.attach(model, optimizer)
    """
    if not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    several = listed(optimizer)
    scaler = scaler_of(several) if scaler is None else scaler
    if isinstance(nodes, Iterable) and not isinstance(nodes, str):  # it is read twice
        nodes = [list(each) if isinstance(each, Iterable) else each for each in nodes]
    asked = Configuration(
        recipe,
        as_python(target),
        policy,
        scaler,
        as_python(seed),
        memory_dtype,
        placement,
        nodes,
        as_python(guard_every),
        as_python(checksums),
        skipped,
        inside,
        gather,
        held_on,
        as_python(cuda_graphs),
    )
    if replicas is None and (sharded := sharded_in(model)) is not None:
        from gradwire._api.fsdp import attach_to_fsdp  # loads FSDP2

        return attach_to_fsdp(sharded, several, asked, process_group)
    source = source_of(model, replicas)
    found = carried(asked, source, several, process_group, source.device, begins_dense=True)
    wire = Wire(Steps(lambda: found), Watch(found), OwnRanks(found), OwnGradients(found))
    if inside is not None or gather is not None:
        from gradwire._api.fsdp import carry_inside

        wire.inside = carry_inside(model, asked)
    return wire


def carried(
    asked: Configuration,
    source: Source,
    optimizer: object,
    process_group: dist.ProcessGroup | None,
    where: torch.device,
    *,
    refusal: Exception | None = None,
    begins_dense: bool = False,
) -> Attached:
    """Build a reducer for `source`, after all ranks have compared their options. A collective.

    Args:
        asked: the options of `attach`.
        source: brings the model's gradients.
        optimizer: the user's optimizer or optimizers, or None.
        process_group: the user's group for all of gradwire's traffic, or None.
        where: a device whose tensors the model's own process group carries.
        refusal: raised here once the other ranks have heard of it.
        begins_dense: gradients may travel dense while kernels that a rank lacks are compiled beside training.
            Otherwise the source waits for them before it sends.

    Raises what `attach` raises.
    """
    device, nodes = device_at(source.device), asked.nodes
    transports = connect(asked, source.group, process_group, device, where, source.lending)
    everyone = transports.everyone
    with given_back_if_refused(lambda: transports.groups):
        mine = partial(neighbours, nodes, dist.get_process_group_ranks(transports.groups[0]), everyone.rank)
        asked, chosen, using = _agreed_recipe(
            asked, source, optimizer, device.where, everyone, also=mine, refusal=refusal
        )
        transports = with_streams(asked, transports, source.group, process_group, where, source.lending)
        if source.members is not None:
            _check_shards(source.members, everyone)
            transports = with_parts(transports, source.members, where, source.lending)
        elif nodes is not None:
            table, why_flat = agreed(kind_of(nodes), mine(), everyone)
            if why_flat and everyone.rank == 0:
                _LOG.warning(_FLAT, why_flat)
            if table is not None:
                adds_up = kind_of(nodes) == "given" or _gains(table, chosen, source, asked.policy)
                flat = transports
                transports = _on_nodes(nodes, table, flat, where, source.lending) if adds_up else flat
                if transports is flat and flat.carrier is not None:
                    flat.carrier.share_links()
        if transports.carrier is not None and transports.cpu is not None:
            source.links = connect_more(transports.carrier, transports.cpu, source.lending, source.links)
    return _assemble(asked, chosen, source, using, transports, begins_dense=begins_dense)


def _gains(table: NodeTable, chosen: Recipe, source: Source, policy: Policy | None) -> bool:
    """True if two levels save more bytes on a node's link than they cost, counted over all traffic. Equal on
    all ranks, from agreed numbers.

    Args:
        table: the ranks of each node.
        chosen: the recipe.
        source: brings the gradients of the parameters.
        policy: which parameters get which recipe.
    """
    from gradwire.control.forecast import gains_by_two_levels

    workers = len(table.nodes) * table.per_node
    composition = chosen.build()
    if gains_by_two_levels(composition, source.specs, workers, table.per_node, policy):
        return True
    if dist.get_rank() == 0:
        _LOG.info(
            "ranks share nodes, but gradients are not added up inside a node first: what %s sends is little "
            "beside the sum inside a node. To add them up, pass nodes= with the ranks of every node",
            short(composition.text),
        )
    return False


def _on_nodes(
    nodes: Nodes, table: NodeTable, transports: Transports, where: torch.device, lending: Lending
) -> Transports:
    """Add groups inside this rank's node and between nodes to `transports`, if torch can make them. A
    collective.

    Args:
        nodes: the argument of `attach`.
        table: the ranks of each node.
        transports: groups of all ranks.
        where: device of the model.
        lending: makes or lends groups.

    If torch cannot make them, returns `transports` with a warning in the log; raises `ValueError` if the user
    gave the nodes.
    """
    try:
        rank = transports.everyone.rank
        return with_parts(transports, (table.inside(rank), table.between(rank)), where, lending)
    except ValueError as error:
        if kind_of(nodes) == "given":
            raise
        _LOG.warning("%s: gradients are not added up inside nodes first", error)
        return transports


def _check_shards(members: tuple[Sequence[int], Sequence[int]], everyone: Comm) -> None:
    """Raise `ValueError`, on all ranks, if ranks of one shard disagree about which shard it is.

    `members` are the ranks of this rank's replica, and those with its shard. A collective.
    """
    inside, between = members
    shape = f"{len(inside)} ranks in each of {len(between)} replicas"
    require_agreement({"shards": shape}, everyone)
    mine = torch.tensor([list(inside).index(everyone.rank), *between], device="cpu")
    table = gathered(everyone, mine)
    if any(len(set(table[row[1:], 0].tolist())) > 1 for row in table):
        raise ValueError(
            "replicas= joins ranks with different shards: it must hold the ranks that have the same place in "
            "fully_shard's meshes"
        )


def _assemble(
    asked: Configuration,
    chosen: Recipe,
    source: Source,
    optimizers: Optimizers,
    transports: Transports,
    *,
    begins_dense: bool,
) -> Attached:
    compiler.forget_foreseen()

    def ended() -> None:
        for each in transports.comms:
            each.close()
        is_sound = backward.is_sound and worker.is_connected
        for each in transports.comms:
            if each.series is not None:
                each.series.end() if is_sound else each.series.keep()
        if is_sound:
            for group in transports.groups:
                give_back(group)

    def transfer() -> BufferTransfer:
        return backward.placement.transfer

    def read(parameter: Tensor) -> Tensor:
        return transfer().read(parameter)

    def begun() -> None:
        transports.device.stay()
        if not transports.device.is_host:
            computes_elsewhere()

    worker = Worker(lambda error: backward.reducer.crash(error), ended, begun=begun)
    uses: dict[str, float] = {}
    level, replicas = None, source.replicas_of(lambda: backward.optimizer_log.optimizers)
    carry: Sequence[Comm] = (transports.everyone,)
    if transports.cpu is not None:
        carry = _carriers(transports.cpu, *transports.parts, checksums=asked.checksums)
    placement, on_host = placements(asked.placement, transports, carry, worker)
    if asked.cuda_graphs and transports.device.graphs() is None:
        _LOG.warning(_NO_GRAPHS, transports.device.where)
    if placement.inside is not None and source.members is None:
        shard = Shard(placement.inside)
        level = NodeReducer(source.specs, shard.parts)
        replicas = shard.replicas(replicas, source.specs)
    env = ReducerEnvironment(
        placement,
        controller_for=controller_for,
        on_host=on_host,
        policy=asked.policy,
        seed=asked.seed,
        memory_dtype=asked.memory_dtype,
        alone=is_alone(carry[-1]),
        tuning=replace(source.tuning, on_device=not placement.memory.is_host),
        timed_every=timed_every(),
        replicas=_transferred(replicas, transfer),
        uses=lambda: uses,
        replica=transports.parts[0].group if transports.parts else None,
        buffers=source.side_broadcast if source.carries_buffers else None,
        check=lambda layout: source.suits(layout, backward.optimizer_log.optimizers),
        source_state=source.source_state,
        captures_for=Captures if asked.cuda_graphs else None,
        prepare=partial(prepare_for, rank=transports.everyone.rank, world=carry[-1].world),
    )
    if not begins_dense:
        beside = PreparedBeside(transports.everyone.rank, carry[-1].world)
        env = replace(env, prepare=beside.begin, await_kernels=beside.wait)
    if transports.carrier is not None:
        env = replace(env, on_link=transports.carrier.expect)
    if asked.scaler is not None:
        hold(source.model, asked.scaler)
        scale = LossScale(asked.scaler, transports.device, source.device)
        env = replace(env, loss_scale=scale, begun=scale.begun)
    if asked.guard_every:
        env.observers.append(Guard(lambda: source.known.held, asked.guard_every, source.is_uneven, read))

    def finished(step: Step) -> None:
        backward.deliver(step) if level is None else level.finish(step, backward.deliver)

    env = replace(env, finished=finished, outcome_known=lambda step: backward.note(step))
    specs = source.specs if level is None else level.specs
    reducer = Reducer(specs, chosen, env, awaited(chosen, specs, env) if begins_dense else None)
    if level is not None:
        level.join(reducer)
    calls = Calls(Board.of(transports.groups[0]) if transports.everyone.world > 1 else None)
    trained = {spec.name: source.parameters[spec.name] for spec in source.specs}
    optimizer_log = OptimizerLog(
        trained,
        optimizers,
        transports.device,
        skipped=asked.skipped,
        alone=transports.everyone.world == 1,
        raises=asked.guard_every > 0,
        may_differ=source.is_uneven,
        stepped=env.stepped,
    )
    side = Backward if transports.device.is_host else DeviceBackward
    backward = side(source, worker, reducer, calls, optimizer_log, level)
    model = weakref.ref(source.model)

    def end() -> None:
        if model() is None and not source.lending.LENDS_NEW:
            backward.let_go()
        else:  # at exit, or with the groups of a meeting, which serve no other model
            worker.stop()

    # At exit too: the thread must not outlive the interpreter's C++ side.
    stop = weakref.finalize(source.model, end)
    decision = chosen.build().next
    counted = uses if decision is not None and decision.uses else None
    source.begin(backward, counted, scaled=asked.scaler is not None)
    backward.event_log.attached()
    claim(source.carrier)
    return Attached(source.model, source, backward, asked.scaler, worker, stop)


def _carriers(*comms: ProcessGroupComm, checksums: bool) -> Sequence[Comm]:
    """The comms that carry the messages of `comms`, with checksums if asked for; the first has all ranks."""
    if not checksums:
        return comms
    from gradwire.comm.checksums import CheckedComm

    everyone, *_ = members = [dist.get_process_group_ranks(each.group) for each in comms]
    named = [[everyone.index(rank) for rank in each] for each in members]
    return [CheckedComm(each, names) for each, names in zip(comms, named, strict=True)]


def _transferred(replicas: Replicas, transfer: Callable[[], BufferTransfer]) -> Replicas:
    """Wrap `replicas` for reading on the worker's thread: cuts and padding are made in the stream of
    the read.
    """

    def cut(name: str) -> Replicated | None:
        with transfer().reading():
            return replicas(name)

    return read_by(lambda tensor: transfer().read(tensor), cut)


def _agreed_recipe(
    asked: Configuration,
    source: Source,
    optimizer: object,
    where: torch.device,
    comm: Comm,
    also: Callable[[], object],
    refusal: Exception | None,
) -> tuple[Configuration, Recipe, Optimizers]:
    """Parse and check everything, and compare it over all ranks. One all-gather if all ranks agree.

    Args:
        asked: the arguments of `attach`.
        source: brings the gradients.
        optimizer: one optimizer or several.
        where: device of the model.
        comm: all ranks.
        also: a further check, which raises.
        refusal: of an argument that was looked at before.

    Returns the arguments with the answers of the policy, the recipe, and the optimizers that use the
    gradients. A rank that must refuse tells the others first, because they would wait for it; all raise then.
    """
    try:
        if refusal is not None:
            raise refusal
        source.check()
        optimizers = optimizers_of(optimizer)
        check_optimizers(optimizers, source.module)
        chosen = asked.validated(source)
        asked = asked.answered(source)
        if asked.inside is not None or asked.gather is not None:
            from gradwire._api.fsdp import check_inside  # loads FSDP2

            check_inside(source.model, asked)
        layout = build(source.specs, chosen.build(), asked.policy, torch.device("meta"), comm.world)
        using = source.applying(optimizers)
        source.suits(layout, using)
        warn_without_optimizer(layout, using)
        also()
        options = OptimizerText.of(dict.fromkeys((*optimizers, *using)))
        facts = asked.fingerprint(chosen, source, where)
        mine = f"{facts} {options}"
    except Exception as error:  # a policy of the user's, or a warning made an error: peers must hear of it
        refusal, mine = error, f"refused, {error}"
    if not is_the_same(mine, comm) or refusal is not None:  # then say which of it, on all ranks
        require_accepted(refusal, comm)
        require_agreement(facts, comm)
        require_same_optimizer(options, comm)
    return asked, chosen, using
