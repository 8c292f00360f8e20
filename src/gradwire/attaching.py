"""The one line: check everything, agree on it, register the hook."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.arena import ParameterSpec, layout_hash, specs_of
from gradwire.checks import check_momentum, warn_without_optimizer
from gradwire.comm import Comm, ProcessGroupComm
from gradwire.comm.groups import borrow, give_back, given_back_if_refused
from gradwire.engine.agree import OptimizerText, require_agreement, require_same_optimizer
from gradwire.engine.alone import is_alone
from gradwire.engine.engine import Engine
from gradwire.engine.layout import Policy, build, chooser
from gradwire.engine.preparing import prepare_for
from gradwire.engine.surroundings import Surroundings
from gradwire.engine.worker import Worker
from gradwire.errors import RanksDisagree
from gradwire.measure.uses import FirstForward
from gradwire.recipes import Recipe, recipe
from gradwire.sources.ddp.buckets import BucketMap
from gradwire.sources.ddp.buffers import Buffers
from gradwire.sources.ddp.copies import leave_out_of_copies
from gradwire.sources.ddp.finer import refine_buckets
from gradwire.sources.ddp.hook import gradwire_hook
from gradwire.sources.ddp.observe import observe, replicas_of
from gradwire.sources.ddp.session import Session
from gradwire.tools.diagnose import Watch
from gradwire.version import __version__
from gradwire.wire import Attached, Wire

_TARGET = 0.95


def attach(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    recipe: str | Recipe = "auto",
    *,
    policy: Policy | None = None,
    scaler: torch.amp.GradScaler | None = None,
    target: float = _TARGET,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    memory_dtype: torch.dtype | None = None,
) -> Wire:
    """Let gradwire carry the gradients of `ddp`. A collective over the ranks of its process group.

    Buffers (BatchNorm's statistics) come along, unless DDP has `broadcast_buffers=False`: rank 0's travel
    under the backward pass, where DDP would broadcast them before the next forward pass (`docs/training.md`).

    - `optimizer`: watched, to warn when several backward passes precede one step; what `gcomp` may drop of a
      gradient follows from it, and recipes that apply momentum themselves (`dgc`, `signum`) check it.
    - `recipe`: `name` or `name(key=value, …)`; see `gradwire.recipes.names()`. On a single rank it compresses
      nothing, as nothing is sent; `dgc`, `signum` and `signsgd(scale="none")`, which do more, go on.
    - `policy`: another recipe for some parameters: glob patterns over names, or a function of the
      parameter; by default vectors and tiny tensors travel densely beside a lossy recipe. That is
      `gradwire.by_size()`; `gradwire.by_size(smallest=16384)` spares larger ones, too.
    - `scaler`: the `GradScaler` in use, so that memory stays free of the loss scale.
    - `target`: the share of the no-communication speed of backward at which "auto" is content; for no other
      recipe.
    - `seed`: of all random choices, equal on all ranks.
    - `process_group`: by default one over the same ranks that only gradwire uses, and this model alone; once
      a model has gone from all ranks, the next one gets its group.
    - `memory_dtype`: `torch.bfloat16` keeps what is unsent in half the space; what that rounds off is lost.

    Raises `ValueError` when something is configured wrongly and `RanksDisagree`, on all ranks, when they
    differ in recipe, policy, seed, version, the names, shapes and dtypes of parameters, buffers, or the
    optimizer's type, groups and options. Options that are tensors are not compared, nor its state.

    Example::

        ddp = DistributedDataParallel(model)
        wire = gradwire.attach(ddp, optimizer)
    """
    _check_model(ddp)
    specs = specs_of(ddp.module, getattr(ddp.module, "_ddp_params_and_buffers_to_ignore", ()))
    group = borrow(ddp.process_group) if process_group is None else _same_ranks(process_group, ddp)
    comm = ProcessGroupComm(group)
    buffers = Buffers(ddp, comm.rank, comm.world)
    with given_back_if_refused(group):
        chosen, described = _agreed_recipe(recipe, target, ddp, specs, policy, memory_dtype, optimizer, comm)
        fields = {"memory_dtype": str(memory_dtype), "buffers": buffers.describe()}
        require_agreement(_fingerprint(chosen, specs, policy, seed, scaler is not None) | fields, comm)
        require_same_optimizer(described, comm)
    session, worker, watch = _assemble(
        ddp, optimizer, scaler, specs, chosen, comm, buffers, policy, seed, memory_dtype
    )
    if not (session.engine.measuring or session.engine.layout.is_plain):
        refine_buckets(ddp, sum(spec.numel * spec.dtype.itemsize for spec in specs))
    ddp.register_comm_hook(session, gradwire_hook)
    return Wire(Attached(ddp, optimizer, scaler, session, watch, worker))


def _assemble(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
    specs: tuple[ParameterSpec, ...],
    chosen: Recipe,
    comm: ProcessGroupComm,
    buffers: Buffers,
    policy: Policy | None,
    seed: int,
    memory_dtype: torch.dtype | None,
) -> tuple[Session, Worker, Watch]:
    def ended() -> None:
        comm.close()
        if session.is_sound and worker.is_connected:
            give_back(comm.group)

    worker = Worker(crashed=lambda error: session.engine.crash(error), ended=ended)
    decision = chosen.build().next
    first = FirstForward(ddp.module) if decision is not None and decision.uses else None
    around = Surroundings(
        comm,
        control=comm,
        post=worker.post,
        policy=policy,
        seed=seed,
        memory_dtype=memory_dtype,
        device=next(p.device for p in ddp.module.parameters() if p.requires_grad),
        alone=is_alone(comm),
        loss_scale=scaler.get_scale if scaler is not None else lambda: 1.0,
        replicas=replicas_of(ddp, optimizer),
        uses=lambda: {} if first is None else first.uses,
        buffers=lambda: buffers.packed,
        check=partial(check_momentum, optimizer=optimizer),
        prepare=partial(prepare_for, rank=comm.rank),
        link_seen=lambda link: None if link is None else comm.expect(link.beta_s),
        inspect=(watch := Watch()),
    )
    session = Session(
        BucketMap(ddp.module, specs),
        buffers,
        worker,
        lambda concluded: Engine(specs, chosen, replace(around, concluded=concluded)),
    )
    # At exit too: the thread must not outlive the interpreter's C++ side.
    weakref.finalize(ddp, worker.stop)
    leave_out_of_copies(ddp, observe(ddp, optimizer, session, first, scaled=scaler is not None))
    return session, worker, watch


def _check_model(ddp: DistributedDataParallel) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(
            f"need a DistributedDataParallel module, got {type(ddp).__name__}; wrap the model first"
        )
    if not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    if getattr(ddp, "_comm_hooks", None) or getattr(ddp, "mixed_precision", None) is not None:
        raise ValueError(
            "this DDP module has a communication hook already (mixed_precision= is one); use a new one"
        )
    devices = {p.device.type for p in ddp.module.parameters() if p.requires_grad}
    if devices != {"cpu"}:
        raise ValueError(f"parameters are on {sorted(devices)}; this version carries CPU tensors only")


def _check_gradients(ddp: DistributedDataParallel) -> None:
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            "this DDP module was built under torch._dynamo.config.optimize_ddp = 'python_reducer', so it has "
            "no buckets to hand over. Set that to True, which is torch's default, and wrap the model again"
        )
    for name, parameter in ddp.module.named_parameters():
        if parameter.is_complex():
            raise ValueError(f"parameter {name!r} is complex; keep it as two real ones")
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"module {name!r} has sparse gradients; build it with sparse=False")


def _agreed_recipe(
    text: str | Recipe,
    target: float,
    ddp: DistributedDataParallel,
    specs: tuple[ParameterSpec, ...],
    policy: Policy | None,
    memory_dtype: torch.dtype | None,
    optimizer: torch.optim.Optimizer | None,
    comm: Comm,
) -> tuple[Recipe, OptimizerText]:
    """Parse, try out, describe; a rank that must refuse tells the others first, which would wait for it."""
    refusal: Exception | None = None
    try:
        _check_gradients(ddp)
        chosen = _chosen(text, target)
        if memory_dtype not in (None, torch.bfloat16):
            raise ValueError(f"memory_dtype={memory_dtype}; choose torch.bfloat16, or leave it out")
        layout = build(specs, chosen.build(), policy, torch.device("meta"))
        check_momentum(layout, optimizer)
        warn_without_optimizer(layout, optimizer)
        described = OptimizerText.of(optimizer)
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
    return chosen, described


def _same_ranks(group: dist.ProcessGroup, ddp: DistributedDataParallel) -> dist.ProcessGroup:
    mine, theirs = dist.get_process_group_ranks(group), dist.get_process_group_ranks(ddp.process_group)
    if mine != theirs:
        raise ValueError(f"process_group has ranks {mine}, the model's has {theirs}; they must be the same")
    if group is ddp.process_group:
        raise ValueError(
            "process_group is the model's own: collectives of DDP and of gradwire would mix. Create another "
            "with torch.distributed.new_group, or leave it out"
        )
    return group


def _chosen(text: str | Recipe, target: float) -> Recipe:
    chosen = recipe(text)
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target={target} is outside (0, 1]; 0.95 means 95 % of the no-communication speed")
    if chosen.name == "auto" and "target" not in chosen.options:
        return recipe(Recipe("auto", {"target": target}))
    if target not in (_TARGET, chosen.options.get("target")):
        raise ValueError(f"target={target} is for the recipe auto; {chosen} would ignore it")
    return chosen


def _fingerprint(
    chosen: Recipe, specs: tuple[ParameterSpec, ...], policy: Policy | None, seed: int, scaled: bool
) -> dict[str, str]:
    choose = chooser(policy)
    lanes = ",".join(choose(spec) or "-" for spec in specs)
    # With the order in memory, in which buckets are filled: equal shapes are not enough to add up.
    shapes = ";".join(f"{spec.shape}{spec.stride or ''}" for spec in specs)
    dtypes = ";".join(str(spec.dtype) for spec in specs)
    return {
        "gradwire version": __version__,
        "recipe": str(chosen),
        "seed": str(seed),
        "policy": "default" if policy is None else lanes,
        "scaler": "given" if scaled else "none",
        "parameter names": " ".join(spec.name for spec in specs),
        "parameter shapes": shapes,
        "parameter dtypes": dtypes,
        "layout": layout_hash(specs),
    }
