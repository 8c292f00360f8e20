"""Watches a script that trains with DDP, without changing a bit of it.

Nothing is sent and no comm hook is registered: DDP's own log (`_get_ddp_logging_data`) has the times of each
step. It is read after each optimizer step, by a hook that torch calls for all optimizers. DDP does not log
passes under `no_sync()`: they are counted in its `forward`, and taken to last as long as the one that is
logged. Time that passes in DataLoaders is added up in their `__next__`. At the end ranks tell each other
their times by the store that they met at.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import wraps
from itertools import chain
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from gradwire.advise.link import card_bit_per_s, latency_s
from gradwire.advise.observed import Observed, ObservedStep, RankSteps, ReadyOrder
from gradwire.environment import cores_per_rank
from gradwire.measure.clock import now_s
from gradwire.quantities import counted

BEGUN = "forward_compute_time_start"
FORWARD, BACKWARD = "forward_compute_time", "backward_compute_time"
SENT, OVERLAPPED = "backward_comm_time", "backward_compute_comm_overlap_time"
"""Keys of DDP's log, in nanoseconds."""

WARMING = 10
"""Steps that are left out: DDP rebuilds its buckets, and allocators and connections warm up."""

ENOUGH = 5
"""Steps from which something is said."""

RATE_OF_TORCH = 100
"""DDP logs one in as many steps, unless it is told otherwise."""

PATIENCE_S = 60.0
"""Seconds to wait for the times of other ranks."""

SENT_BYTES = {
    "": 0,
    "allreduce_hook": 0,
    "BuiltinCommHookType.ALLREDUCE": 0,
    "fp16_compress_hook": 2,
    "bf16_compress_hook": 2,
    "BuiltinCommHookType.FP16_COMPRESS": 2,
}
"""Bytes per element that each comm hook of torch sends; 0 for those of the gradients. What others send is not
known."""


class Log:
    """The steps of one DDP instance on this rank, as DDP has logged them.

    DDP logs a pass when the next one begins, and a step is known when the one after it has begun.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self.steps: list[ObservedStep] = []
        self.passes: list[int] = []
        self._first_ready_s: list[float] = []
        self._data: dict[str, Any] = {}
        self._unsent = 0
        self.parameter_bytes = 0
        self.ranks: tuple[int, ...] = ()
        """The ranks over which this instance averages, by their numbers in the run."""

    def passed(self, ddp: DistributedDataParallel) -> None:
        """Count a forward pass of `ddp`, if it is this one and its gradients will not be sent."""
        is_own = self._ddp() is ddp
        if is_own and torch.is_grad_enabled() and not ddp.require_backward_grad_sync:
            self._unsent += 1

    def stepped(self, optimizing_s: float, loading_s: float) -> bool:
        """Read the log after an optimizer step; whether DDP has logged another pass.

        The optimizer took `optimizing_s`, and DataLoaders were waited for `loading_s`.
        """
        ddp = self._ddp()
        if ddp is None or ddp.logger is None:
            return False
        self.log_each(1)  # gradwire's attach, for one, gives it a new reducer, which logs as seldom as ever
        data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        passes = data.get("iteration", 0) - self._data.get("iteration", 0)
        if passes <= 0:
            return False
        before, self._data = self._data, data
        unsent, self._unsent = self._unsent, 0
        self.ranks = self.ranks or tuple(dist.get_process_group_ranks(ddp.process_group))
        self.parameter_bytes = data.get("total_parameter_size_bytes", 0)
        step_s = 1e-9 * (data.get(BEGUN, 0) - before.get(BEGUN, 0))
        if data["iteration"] <= WARMING or not before or min(step_s, data.get(SENT, 0)) <= 0:
            return True
        exposed_s = passes * 1e-9 * max(data[SENT] - data[OVERLAPPED], 0)
        computing_s = (passes + unsent) * 1e-9 * (data[FORWARD] + data[BACKWARD])
        self.steps.append(
            ObservedStep(
                step_s=step_s,
                input_s=min(loading_s, step_s),
                backward_s=1e-9 * data[BACKWARD],
                communicating_s=passes * 1e-9 * data[SENT],
                exposed_s=min(exposed_s, step_s),
                optimizer_s=min(optimizing_s, step_s) if ddp.device_type == "cpu" else 0.0,
                between_s=max(step_s - computing_s - exposed_s - optimizing_s - loading_s, 0.0),
            )
        )
        self.passes.append(passes)
        self._first_ready_s.append(1e-9 * max(data[BACKWARD] - data[OVERLAPPED], 0))
        return True

    def log_each(self, rate: int) -> None:
        """Let DDP log one in `rate` passes."""
        ddp = self._ddp()
        if ddp is not None and ddp.logger is not None:
            ddp._set_ddp_runtime_logging_sample_rate(rate)  # type: ignore[no-untyped-call]

    def told(self) -> dict[str, Any]:
        """Everything that the first rank needs of this rank, for JSON."""
        return {"steps": [list(vars(step).values()) for step in self.steps], "latency_s": latency_s()}

    def observed(self, told: Sequence[dict[str, Any] | None]) -> Observed:
        """The run, from what each of `ranks` has told; `None` of a rank that has not."""
        data, ranks = self._data, self.ranks
        known = [
            RankSteps(rank, tuple(ObservedStep(*numbers) for numbers in each["steps"]))
            for rank, each in zip(ranks, told, strict=True)
            if each is not None and each["steps"]
        ]
        latencies_s = [each["latency_s"] for each in told if each is not None and each["latency_s"]]
        silent = [str(rank) for rank, each in zip(ranks, told, strict=True) if each is None]
        prefix = "rebuilt_" if data.get("rebuilt_bucket_sizes") else ""
        buckets = list(chain.from_iterable(_numbers(data.get(f"{prefix}bucket_sizes", ""))))
        gradients = self._gradients(_numbers(data.get(f"{prefix}per_bucket_param_indices", "")))
        hook = str(data.get("comm_hook", ""))
        held_bytes = 4 if gradients is None else gradients.element_bytes
        sent_bytes = SENT_BYTES.get(hook, 0) or held_bytes
        return Observed(
            source=f"watched on {counted(len(ranks), 'rank')}",
            wrapper="DDP",
            backend=str(data.get("backend_name", "")),
            world=len(ranks),
            ranks=tuple(known),
            gradients=gradients,
            buckets=tuple(size * sent_bytes / held_bytes for size in buckets) if hook in SENT_BYTES else (),
            calls=median(self.passes) * len(buckets),
            passes=median(self.passes),
            per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            finds_unused=bool(data.get("find_unused_parameters")) and not data.get("unused_parameter_size"),
            hook="gradwire.attach" if (waits := self._waits_unseen()) == "gradwire" else hook,
            is_blind=bool(waits),
            latency_s=median(latencies_s) if latencies_s else None,
            card_bit_per_s=card_bit_per_s(),
            cores_per_rank=cores_per_rank(),
            threads=torch.get_num_threads(),
            missing=(f"nothing came from rank {', '.join(silent)}",) if silent else (),
        )

    def _waits_unseen(self) -> str:
        """Whose code may wait for the network where DDP's log does not show it: "gradwire", "script" or "".

        DDP sees the waiting for what hooks of torch send.
        """
        ddp = self._ddp()
        if ddp is None:
            return ""
        hooks = [hook for hook, _ in ddp._comm_hooks]
        owners = {_home(hook) for hook in hooks}
        for module in (ddp, ddp.module):
            registered = chain(module._forward_pre_hooks.values(), module._forward_hooks.values())
            owners |= {home for hook in registered if (home := _home(hook)) == "gradwire"}
        return "gradwire" if "gradwire" in owners else "script" if owners - {"torch"} else ""

    def _gradients(self, buckets: Sequence[Sequence[int]]) -> ReadyOrder | None:
        """Shapes and ready times of the gradients, in the order of DDP's `buckets` of parameter numbers.
        Two times are measured: the end of the first bucket and the end of the backward pass. All other ready
        times are interpolated. `None` if the buckets do not fit the model.
        """
        ddp = self._ddp()
        parameters = [] if ddp is None else list(ddp._module_parameters)
        order = list(chain.from_iterable(buckets))
        if not order or max(order) >= len(parameters):
            return None
        first, last_s = len(buckets[0]), median(step.backward_s for step in self.steps)
        first_s = min(median(self._first_ready_s), last_s)
        rest = max(len(order) - first, 1)
        ready_s = [first_s * (place + 1) / first for place in range(first)]
        ready_s += [first_s + (last_s - first_s) * (place + 1) / rest for place in range(len(order) - first)]
        held = [parameters[index] for index in order]
        return ReadyOrder(
            tuple(tuple(each.shape) for each in held),
            tuple(ready_s),
            max(each.element_size() for each in held),
            assumed=True,
        )


class DDPWatch:
    """A context in which DDP is watched for `steps` steps after it has warmed up.

    `finished` is called once with what was observed, on the first of the ranks that took part, and with
    `None` on the others: when the steps are over, inside of the optimizer's step, or when `conclude` is
    called before that.

    Args:
        steps: steps that are watched.
        finished: takes the result.
    """

    def __init__(self, steps: int, finished: Callable[[Observed | None], None]) -> None:
        self._steps, self._finished = steps, finished
        self._logs: list[Log] = []
        self._undo = ExitStack()
        self._optimizing_s = self._began_s = self._loading_s = 0.0
        self.is_over = False

    def __enter__(self) -> DDPWatch:
        watch, made = self, DistributedDataParallel.__init__
        forward: Callable[..., Any] = DistributedDataParallel.forward
        loaded = dataloader._BaseDataLoaderIter.__next__

        @wraps(made)
        def init(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            made(ddp, *args, **kwargs)
            watch._logs.append(Log(ddp))

        @wraps(forward)
        def passed(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                for log in watch._logs:
                    log.passed(ddp)
            return forward(ddp, *args, **kwargs)

        @wraps(loaded)
        def load(batches: Any) -> Any:
            began_s = now_s()
            try:
                return loaded(batches)
            finally:
                watch._loading_s += now_s() - began_s

        self._replace(DistributedDataParallel, "__init__", init)
        self._replace(DistributedDataParallel, "forward", passed)
        self._replace(dataloader._BaseDataLoaderIter, "__next__", load)
        self._undo.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after).remove)
        return self

    def __exit__(self, *_error: object) -> None:
        self._undo.close()

    def _replace(self, owner: type, name: str, function: Callable[..., Any]) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, function)

    def _before(self, *_step: object) -> None:
        self._began_s = now_s()

    def _after(self, *_step: object) -> None:
        if self.is_over:
            return
        self._optimizing_s += now_s() - self._began_s
        logged = [log.stepped(self._optimizing_s, self._loading_s) for log in self._logs]
        if any(logged):
            self._optimizing_s = self._loading_s = 0.0
            if max(len(log.steps) for log in self._logs) >= self._steps:
                self.conclude()

    @property
    def seen(self) -> str:
        """Why there is no advice, in a sentence; empty if there are enough steps."""
        if not self._logs:
            start = "" if "RANK" in os.environ else "Start the script with torchrun. "
            return (
                f"no DistributedDataParallel was made in this process. {start}Children of mp.spawn are not "
                "watched. For FSDP2, give traces that torch.profiler recorded. Where gradwire trains without "
                "DDP, print(wire.report()) says what a step waits for"
            )
        most = max(len(log.steps) for log in self._logs)
        if most < ENOUGH:
            return (
                f"the script ended when {counted(most, 'step')} had been watched: {ENOUGH} are needed, after "
                f"{WARMING} in which it warms up, and an optimizer of torch.optim has to step in each"
            )
        return ""

    def conclude(self) -> None:
        """End watching: exchange what ranks have seen, and hand it over. Does nothing the second time."""
        if self.is_over or self.seen:
            return
        self.is_over = True  # hooks go with the context: torch is going through all of them now
        log = max(self._logs, key=lambda each: (len(each.steps) >= ENOUGH, each.parameter_bytes))
        for each in self._logs:
            each.log_each(RATE_OF_TORCH)
        told = _exchanged(log.told(), log.ranks)
        self._finished(None if told is None else log.observed(told))


def _exchanged(own: dict[str, Any], ranks: Sequence[int]) -> list[dict[str, Any] | None] | None:
    """Gather what each of `ranks` tells, on the first of them, by the store; `None` on all others.

    A rank that tells nothing within `PATIENCE_S` is left out. If the process group is gone, all others are.
    """
    if not dist.is_initialized():
        first = int(os.environ.get("RANK", "0")) == ranks[0]
        return [own, *[None] * (len(ranks) - 1)] if first else None
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    if rank != ranks[0]:
        store.set(f"gradwire/advise/{rank}", json.dumps(own))
        return None
    told: list[dict[str, Any] | None] = [own]
    for other in ranks[1:]:
        key = f"gradwire/advise/{other}"
        try:
            store.wait([key], timedelta(seconds=PATIENCE_S))
            told.append(json.loads(store.get(key)))
        except dist.DistStoreError:
            told.append(None)
    return told


def _home(hook: Any) -> str:
    """The package that a hook comes from: "torch", "gradwire" or another one."""
    name = getattr(hook, "__module__", None) or type(hook).__module__
    return str(name).partition(".")[0]


def _numbers(text: str) -> list[list[int]]:
    """Lists of numbers as DDP logs them, such as "0 1, 2"."""
    return [[int(number) for number in part.split()] for part in text.split(",") if part.strip()]
