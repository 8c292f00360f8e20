"""One rank of one setting, as a process, told what to do line by line.

Idle workers block in a read and cost no processor time, so many settings can be alive at once and take turns.
"""

import os
import sys
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

from gradwire.lab import emulate
from gradwire.lab.bench.channel import Message, WorkerEnd
from gradwire.lab.bench.clock import peak_bytes
from gradwire.lab.bench.entries import parse_entry
from gradwire.lab.bench.settings import Task
from gradwire.lab.bench.timeline import record
from gradwire.lab.bench.trainer import Trainer, build


class Worker:
    """Answers commands; every method named `do_…` is one."""

    def __init__(self, end: WorkerEnd) -> None:
        self._end = end
        self._trainer: Trainer | None = None

    def do_setup(self, command: Message) -> Message:
        """Join the group and build the model; again with another seed to start over."""
        if not dist.is_initialized():
            dist.init_process_group(emulate.backend())
        entry = parse_entry(command["entry"], command["kind"])
        self._trainer = None  # free the old model first
        self._trainer = build(entry, Task(**command["task"]), command["seed"])
        model = self._trainer.model
        numel = sum(item.numel() for item in model.parameters() if item.requires_grad)
        buffer_bytes = sum(item.numel() * item.element_size() for item in model.buffers())
        return {
            "parameters": numel,
            "buffer_bytes": buffer_bytes,
            "workload": self._trainer.workload.describe(),
        }

    def do_hello(self, command: Message) -> Message:
        """All modules are imported."""
        return {}

    def do_steps(self, command: Message) -> Message:
        """Train; one message per step, then the account."""
        trainer = self._running()
        for _ in range(command["count"]):
            self._end.send({"step": trainer.step().as_dict()})
        return {"report": trainer.report(), "peak_bytes": peak_bytes()}

    def do_check(self, command: Message) -> Message:
        """Hash of the replica."""
        return {"fingerprint": self._running().fingerprint(), "peak_bytes": peak_bytes()}

    def do_evaluate(self, command: Message) -> Message:
        """Figures of merit on held-out data; local, no communication."""
        start = time.perf_counter()
        model = self._running().model
        model.eval()
        with torch.no_grad():
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
    worker = Worker(end)
    for command in end:
        worker.answer(command)
    sys.stdout.flush()
    # The peers of an ended setting may be dead: an orderly goodbye to the process group could hang.
    os._exit(0)
