"""One rank of one setting: builds the model as a user would, and measures its training steps.

Recipes, peers, plain DDP and the bound read the clock in the same places.
"""

import hashlib
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.kernels import compiler
from gradwire.recipes.parse import steady
from gradwire.step.layout import TINY, TINY_ELEMENTS, Policy, by_size
from gradwire_lab.bench import peers
from gradwire_lab.bench.settings import BenchEntry, TrainingTask, parse_entry
from gradwire_lab.bench.statistics import StepSample
from gradwire_lab.workloads.base import Shards, Workload
from gradwire_lab.workloads.catalogue import workload


class GradientClock:
    """Notes when the last local gradient was computed.

    A tensor hook on every parameter fires when autograd hands over its gradient, *before* DDP's own hook sees
    it; the last to fire ends the local computation. One attribute write per parameter and step.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.last_s = 0.0
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, gradient: torch.Tensor) -> None:
        self.last_s = time.perf_counter()


def peak_bytes() -> int:
    """Largest resident size so far, in bytes; a forked process begins with the modules of its parent.

    From /proc if there is one: `ru_maxrss` survives exec, so a child would begin with its launcher's figure.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_FORMS = "expected none, by_size(smallest=256), or pattern=recipe; pattern=recipe"


def policy_of(text: str) -> Policy:
    """The `policy` argument of `attach`, from a text of one of three forms.

    `none`: every parameter by the recipe. `by_size(smallest=256)`: vectors and tensors of fewer elements as
    the recipe sends its tiny ones, or by `recipe=…`. `pattern=recipe; pattern=recipe`: glob patterns over
    names, of which the first match counts. `ValueError` for anything else, and for recipes that a policy
    cannot name.

    >>> policy_of("*.bias=dense; head.*=topk(ratio=0.1)")
    {'*.bias': 'dense', 'head.*': 'topk(ratio=0.1)'}
    """
    if text.strip() == "none":
        return {}
    if text.strip().startswith("by_size"):
        return _by_size(parse_entry(text, "policy"))
    pairs = [piece.partition("=") for piece in text.split(";") if piece.strip()]
    patterns = {pattern.strip(): recipe.strip() for pattern, _, recipe in pairs}
    if not pairs or not all(pattern and recipe for pattern, recipe in patterns.items()):
        raise ValueError(f"policy {text!r}: {_FORMS}")
    if len(patterns) < len(pairs):
        raise ValueError(f"policy {text!r}: a pattern is given twice")
    for recipe in patterns.values():
        steady(recipe, "policy")
    return patterns


def _by_size(entry: BenchEntry) -> Policy:
    options = {"smallest": TINY_ELEMENTS, "recipe": TINY, **entry.options}
    smallest, recipe = options.pop("smallest"), options.pop("recipe")
    if entry.stem != "by_size" or options:
        raise ValueError(f"policy {entry.name!r}: {_FORMS}")
    if not isinstance(smallest, int) or smallest < 0:
        raise ValueError(f"policy {entry.name!r}: smallest={smallest!r} must be a number of elements")
    if recipe != TINY:
        steady(str(recipe), "policy")
    return by_size(smallest, str(recipe))


@dataclass
class Trainer:
    """A model, its data and its optimizer; `module` is DDP, or `model` itself.

    `clock` is `None` where FSDP2's traffic is compared: there, gathers and scatters lie within the forward
    and the backward pass. Parameters are whole within `whole()`, and as they are saved within `exact()`.
    `sent_bytes` is what stock FSDP2 sends per rank and step; `None` for other settings.
    """

    workload: Workload
    model: torch.nn.Module
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    batches: Iterator[Any]
    clock: GradientClock | None
    wire: gradwire.Wire | None
    hook_clock: peers.HookClock | None
    whole: Callable[[], AbstractContextManager[None]] = nullcontext
    exact: Callable[[], AbstractContextManager[None]] = nullcontext
    sent_bytes: float | None = None

    def step(self) -> StepSample:
        """One training step with its timings (seconds)."""
        cpu, compiled_s = time.process_time(), compiler.compiled_s()
        start = time.perf_counter()
        batch = next(self.batches)
        data = time.perf_counter()
        loss = self.workload.loss(self.module, batch)
        forward = time.perf_counter()
        if self.clock is not None:
            # A cut graph (every parameter unused) would leave the mark of an earlier step.
            self.clock.last_s = forward
        loss.backward()  # type: ignore[no-untyped-call]
        backward = time.perf_counter()
        computed = backward if self.clock is None else self.clock.last_s
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        stop = time.perf_counter()
        return StepSample(
            step_s=stop - start,
            data_s=data - start,
            forward_s=forward - data,
            backward_s=computed - forward,
            exposed_comm_s=None if self.clock is None else backward - computed,
            optimizer_s=stop - backward,
            cpu_s=time.process_time() - cpu,
            loss=float(loss.detach()),
            hook_s=None if self.hook_clock is None else self.hook_clock.collect(),
            compile_s=compiler.compiled_s() - compiled_s,
            settled=self.wire is None or self.wire.settled,
        )

    def fingerprint(self) -> str:
        """A hash over every parameter's bytes: equal on two ranks exactly when their replicas are.

        Under FSDP2 it is a collective, and of the weights that this rank computes with.
        """
        digest = hashlib.blake2b(digest_size=16)
        with self.whole():
            for parameter in self.model.parameters():
                # A copy, because FSDP2 cannot free memory that numpy has seen.
                flat = parameter.detach().reshape(-1).clone()
                digest.update(flat.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def report(self, *, timeline: bool = False) -> dict[str, Any] | None:
        """The account of `wire`, None without one; the last step's spans only on request."""
        if self.wire is None:
            return None
        account: dict[str, Any] = {**self.wire.report().as_dict(), "settled": self.wire.settled}
        if not timeline:
            del account["timeline"]
        return account


def build(entry: BenchEntry, task: TrainingTask, seed: int) -> Trainer:
    """Model, data and optimizer from `seed` on this rank; a collective unless the entry is a bound."""
    rank, world = dist.get_rank(), dist.get_world_size()
    work = workload(
        task.workload,
        data=None if task.data is None else Path(task.data),
        shards=cast(Shards, task.shards),
        batch_size=task.batch_size,
    )
    model = work.model(seed)
    # Dropout and the like draw from the global generator: reproducible, and different on every rank.
    torch.manual_seed(seed * 1009 + rank)
    module, own = model, dict[str, Any]()
    if task.sharded and entry.kind != "bound":
        from gradwire_lab.bench import sharded  # not before: a wire compiles kernels of all that is imported

        sharded.shard(model, entry)
        optimizer = work.optimizer(list(model.parameters()))
        wire, hook_clock = sharded.attach(entry, model, optimizer, seed), None
        own["whole"] = partial(sharded.gathered, model)
        if wire is None:
            own["sent_bytes"] = sharded.sent_bytes(model, entry)
        else:
            own["exact"] = wire.exact
    else:
        if entry.kind != "bound":
            module = _data_parallel(model, entry, task, work)
        optimizer = work.optimizer(list(model.parameters()))
        wire, hook_clock = _synchronise(entry, task, work, module, optimizer, seed)
    return Trainer(
        workload=work,
        model=model,
        module=module,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(
            optimizer, partial(learning_rate_factor, task.decay_steps)
        ),
        batches=iter(work.batches(rank, world, seed)),
        clock=None if task.sharded else GradientClock(model.parameters()),
        wire=wire,
        hook_clock=hook_clock,
        **own,
    )


def learning_rate_factor(decay_steps: int | None, step: int) -> float:
    """Full for a fifth of the steps, then linearly down to zero; full throughout without an end in sight.

    >>> [learning_rate_factor(100, step) for step in (0, 20, 60, 100, 120)]
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if decay_steps is None:
        return 1.0
    return min(1.0, max(0.0, 1.25 * (1 - step / decay_steps)))


def _data_parallel(
    model: torch.nn.Module, entry: BenchEntry, task: TrainingTask, work: Workload
) -> DistributedDataParallel:
    """Wrap `model` in DDP with equal arguments in all settings; only a peer's own `bucket_cap_mb` in `entry`
    differs, and it shows in the setting's name.
    """
    wanted = entry.options.get(peers.BUCKET_OPTION) if entry.kind == "peer" else None
    usual = work.bucket_cap_mb if task.bucket_cap_mb is None else task.bucket_cap_mb
    cap_mb = usual if wanted is None else float(cast("float", wanted))
    # The view saves DDP a copy of all gradients per step; all settings get it.
    return DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)


def _synchronise(
    entry: BenchEntry,
    task: TrainingTask,
    work: Workload,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
) -> tuple[gradwire.Wire | None, peers.HookClock | None]:
    if not isinstance(module, DistributedDataParallel):
        return None, None
    if entry.kind == "peer":
        return None, peers.install(entry, module)
    _leave_momentum(entry, optimizer)
    wire = gradwire.attach(module, optimizer, entry.name, policy=policy_for(task, work), seed=seed)
    wire.overlap = task.overlap
    return wire, None


def policy_for(task: TrainingTask, work: Workload) -> Policy | None:
    """The policy of all recipes: the task's, else the workload's; None is the default of `attach`."""
    text = work.policy if task.policy is None else task.policy
    return None if text is None else policy_of(text)


def _leave_momentum(entry: BenchEntry, optimizer: torch.optim.Optimizer) -> None:
    """A recipe that applies momentum before gradients are sent takes over SGD's, so that all train alike."""
    memory = gradwire.recipe(entry.name).build().exchange.memory
    if memory is not None and memory.covers_momentum and isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
