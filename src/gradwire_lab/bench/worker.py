"""Worker process of one rank of one setting; it reads commands line by line.

Idle workers block in a read and cost no processor time, so several settings can exist at once and alternate.
"""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from gradwire.kernels import compiler
from gradwire_lab import emulate
from gradwire_lab.bench.process_set import Message, WorkerEnd
from gradwire_lab.bench.settings import TrainingTask, parse_entry
from gradwire_lab.bench.trainer import Trainer, build, peak_bytes

Span = dict[str, Any]
"""{"what": "backward" | "encode" | "wire" | "decode" | "wait", "unit", "start_s", "stop_s"}, seconds from the
start of the step's backward pass."""


SETTLING = 4
"""Steps before those that are traced: the link, or DDP's hook, has just changed."""


def record(trainer: Trainer, steps: int) -> list[Span]:
    """Train a few steps, then `steps` more; returns the spans of the one of median length among these.

    Every rank must call it.
    """
    probe = _BucketProbe()
    bare = trainer.wire is None and trainer.hook_clock is None
    if bare and isinstance(trainer.module, DistributedDataParallel):
        # DDP accepts one hook ever, so this ends the comparison without a hook: trace it last.
        trainer.module.register_comm_hook(None, probe.all_reduce)
    for _ in range(SETTLING):
        trainer.step()
    return typical([_spans(trainer, probe) for _ in range(steps)])


def _spans(trainer: Trainer, probe: "_BucketProbe") -> list[Span]:
    """Train one more step, and return its spans of work."""
    probe.reset()
    sample = trainer.step()
    if trainer.wire is not None:
        account = trainer.report(timeline=True) or {}
        return list(account["timeline"])
    backward_s, waited_s = sample.backward_s, sample.exposed_comm_s
    assert trainer.clock is not None, "it is DDP that is traced"
    assert waited_s is not None, "as its clock tells it"
    return [
        {"what": "backward", "unit": "", "start_s": 0.0, "stop_s": backward_s},
        *probe.spans(trainer.clock.last_s - backward_s),
        {"what": "wait", "unit": "", "start_s": backward_s, "stop_s": backward_s + waited_s},
    ]


def typical(steps: Sequence[list[Span]]) -> list[Span]:
    """The step of median length; of an even number, the upper of the middle two.

    >>> typical([[{"stop_s": 3.0}], [{"stop_s": 1.0}], [{"stop_s": 2.0}]])
    [{'stop_s': 2.0}]
    """
    ordered = sorted(steps, key=lambda spans: max(span["stop_s"] for span in spans))
    return ordered[len(ordered) // 2]


class _BucketProbe:
    """DDP's default all-reduce, spelled out as a hook so that each bucket's time on the wire is seen."""

    def __init__(self) -> None:
        self._sent: list[tuple[str, float]] = []
        self._arrived: dict[str, float] = {}

    def reset(self) -> None:
        self._sent, self._arrived = [], {}

    def all_reduce(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        name = f"bucket {bucket.index()}"
        self._sent.append((name, time.perf_counter()))
        tensor = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None

        def arrived(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self._arrived[name] = time.perf_counter()
            return future.value()[0]

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(arrived)
        return future

    def spans(self, origin_s: float) -> list[Span]:
        return [
            {"what": "wire", "unit": name, "start_s": at - origin_s, "stop_s": self._arrived[name] - origin_s}
            for name, at in self._sent
            if name in self._arrived
        ]


class BenchWorker:
    """Answers commands; every method named `do_…` is one."""

    def __init__(self, end: WorkerEnd) -> None:
        self._end = end
        self._trainer: Trainer | None = None

    def do_setup(self, command: Message) -> Message:
        """Join the group and build the model; again with another seed to start over."""
        compiled_s = compiler.compiled_s()
        if not dist.is_initialized():
            dist.init_process_group(emulate.backend())
        entry = parse_entry(command["entry"], command["kind"])
        self._trainer = None  # free the old model first
        self._trainer = build(entry, TrainingTask(**command["task"]), command["seed"])
        model = self._trainer.model
        numel = sum(item.numel() for item in model.parameters() if item.requires_grad)
        buffer_bytes = sum(item.numel() * item.element_size() for item in model.buffers())
        sent_bytes = self._trainer.sent_bytes
        return {
            "parameters": numel,
            # FSDP2 leaves buffers to each rank.
            "buffer_bytes": 0 if command["task"].get("sharded") else buffer_bytes,
            **({} if sent_bytes is None else {"sent_bytes": sent_bytes}),
            "compile_s": compiler.compiled_s() - compiled_s,
            "workload": self._trainer.workload.describe(),
        }

    def do_hello(self, command: Message) -> Message:
        return {}

    def do_steps(self, command: Message) -> Message:
        """Train; one message per step, then the account."""
        trainer = self._running()
        for _ in range(command["count"]):
            self._end.send({"step": trainer.step().as_dict()})
        return {"report": trainer.report(), "peak_bytes": peak_bytes()}

    def do_check(self, command: Message) -> Message:
        """Answer with a hash of this rank's replica, and the peak of its memory in bytes."""
        return {"fingerprint": self._running().fingerprint(), "peak_bytes": peak_bytes()}

    def do_evaluate(self, command: Message) -> Message:
        """Figures of merit on held-out data; local, no communication, but a collective under FSDP2."""
        start = time.perf_counter()
        model = self._running().model
        model.eval()
        with torch.no_grad(), self._running().exact():
            figures = self._running().workload.evaluate(model)
        model.train()
        return {"evaluation": figures, "evaluate_s": time.perf_counter() - start}

    def do_trace(self, command: Message) -> Message:
        """Spans of computation and communication within one step."""
        return {"spans": record(self._running(), command["steps"])}

    def answer(self, command: Message) -> None:
        """Run one command and send its closing message, or the traceback."""
        try:
            result: dict[str, Any] = getattr(self, f"do_{command['op']}")(command)
        except Exception as error:
            self._end.send({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        else:
            self._end.send({"done": command["op"], **result})

    def _running(self) -> Trainer:
        assert self._trainer is not None, "setup comes first"
        return self._trainer


def serve(commands: int, answers: int) -> None:
    """Answer on one file descriptor until the launcher closes the other."""
    # One thread per worker unless the user has said otherwise: gradwire's own count free cores alike.
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    torch.set_num_threads(int(threads) if threads.isdigit() else 1)
    end = WorkerEnd(commands, answers)
    worker = BenchWorker(end)
    for command in end:
        worker.answer(command)
    sys.stdout.flush()
    # The peers of an ended setting may be dead: an orderly goodbye to the process group could hang.
    os._exit(0)
