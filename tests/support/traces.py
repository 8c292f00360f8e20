"""Traces of a run of DDP whose times are known, as torch.profiler writes them."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One rank of a run; times in seconds, sizes in float32 elements.

    `layers` are parameters in the order in which gradients become ready, evenly over the backward pass,
    and `buckets` says how many of them are in each all-reduce. An all-reduce of x bytes takes `latency_s` and
    x·`byte_s`, one after the other. The first one also waits `waits_s` for a late rank. `micro` passes
    before the last one of a step send nothing.
    """

    rank: int = 0
    world: int = 2
    steps: int = 8
    input_s: float = 0.002
    forward_s: float = 0.03
    backward_s: float = 0.06
    optimizer_s: float = 0.004
    layers: tuple[tuple[int, ...], ...] = ((1000, 500),) * 8
    buckets: tuple[int, ...] = (1, 4, 3)
    latency_s: float = 0.001
    byte_s: float = 2e-8
    waits_s: float = 0.0
    micro: int = 0
    nccl: bool = False
    shapes: bool = True
    loader: bool = True
    optimizer: bool = True
    profiled: bool = False
    origin_s: float = 5000.0

    @property
    def sizes_bytes(self) -> list[int]:
        """Of each all-reduce."""
        numel = [4 * _product(shape) for shape in self.layers]
        ends = [0]
        for number in self.buckets:
            ends.append(ends[-1] + number)
        return [sum(numel[a:b]) for a, b in pairwise(ends)]

    @property
    def exposed_s(self) -> float:
        """By the same rule as in `events`."""
        free_s, ready = 0.0, 0
        for number, size in enumerate(self.sizes_bytes):
            ready += self.buckets[number]
            start_s = max(free_s, self.backward_s * ready / len(self.layers))
            free_s = start_s + self.latency_s + size * self.byte_s + self.waits_s * (number == 0)
        return max(free_s - self.backward_s, 0.0)

    @property
    def step_s(self) -> float:
        """All parts one after the other."""
        passes = (self.micro + 1) * (self.input_s + self.forward_s + self.backward_s)
        return passes + self.exposed_s + self.optimizer_s

    @property
    def header(self) -> dict[str, Any]:
        """The keys beside the events."""
        backend = "nccl" if self.nccl else "gloo"
        info = {"backend": backend, "rank": self.rank, "world_size": self.world}
        return {"schemaVersion": 1, "distributedInfo": info}

    def events(self) -> list[Event]:
        """All events, in the order in which they began."""
        found: list[Event] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
        at_s = self.origin_s
        for step in range(self.steps):
            begun_s = at_s
            for micro in range(self.micro + 1):
                at_s = self._pass(found, at_s, sends=micro == self.micro)
            if self.optimizer:
                found.append(_event("Optimizer.step#SGD.step", "user_annotation", at_s, self.optimizer_s))
            at_s += self.optimizer_s
            if self.profiled:
                found.append(_event(f"ProfilerStep#{step}", "user_annotation", begun_s, at_s - begun_s))
        return sorted(found, key=lambda event: float(event.get("ts", 0.0)))

    def _pass(self, found: list[Event], at_s: float, *, sends: bool) -> float:
        """The events of a forward and a backward pass; when it is over."""
        if self.loader:
            name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            found.append(_event(name, "user_annotation", at_s, self.input_s))
        at_s += self.input_s
        found.append(_event("DistributedDataParallel.forward", "user_annotation", at_s, 0.9 * self.forward_s))
        at_s += self.forward_s
        each_s = self.backward_s / len(self.layers)
        for number, shape in enumerate(self.layers):
            node_s = at_s + number * each_s
            node = "autograd::engine::evaluate_function: "
            found.append(_event(f"{node}AddmmBackward0", "cpu_op", node_s, 0.5 * each_s))
            add = "torch::autograd::AccumulateGrad"
            args = {"Input Dims": [list(shape)], "Input type": ["float"]} if self.shapes else {}
            found.append(_event(f"{node}{add}", "cpu_op", node_s + 0.6 * each_s, 0.4 * each_s))
            found.append(_event(add, "cpu_op", node_s + 0.7 * each_s, 0.3 * each_s, args))
        if self.nccl:
            found.append(_event("ampere_sgemm", "kernel", at_s, self.backward_s))
        if not sends:
            return at_s + self.backward_s
        free_s, ready = at_s, 0
        for number, size in enumerate(self.sizes_bytes):
            ready += self.buckets[number]
            start_s = max(free_s, at_s + ready * each_s)
            took_s = self.latency_s + size * self.byte_s + self.waits_s * (number == 0)
            found += self._collective(start_s, took_s, size // 4)
            free_s = start_s + took_s
        return max(free_s, at_s + self.backward_s)

    def _collective(self, start_s: float, took_s: float, numel: int) -> list[Event]:
        if not self.nccl:
            args = {"Input Dims": [[numel]], "Input type": ["float"]} if self.shapes else {}
            return [_event("gloo:all_reduce", "cpu_op", start_s, took_s, args, thread=7)]
        said = {"Collective name": "allreduce", "In msg nelems": numel, "Out msg nelems": numel}
        said |= {"Group size": self.world, "dtype": "Float", "Process Group Name": "0"}
        return [
            _event("record_param_comms", "cpu_op", start_s, 1e-5, said),
            _event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", "kernel", start_s, took_s),
        ]

    @property
    def raw(self) -> bytes:
        """The text of the trace."""
        return json.dumps({**self.header, "traceEvents": self.events(), "traceName": "run"}).encode()

    def write(self, path: Path) -> Path:
        """The trace in a file; packed where its name ends in .gz."""
        path.write_bytes(gzip.compress(self.raw) if path.suffix == ".gz" else self.raw)
        return path


def _event(
    name: str, category: str, start_s: float, took_s: float, args: Event | None = None, thread: int = 1
) -> Event:
    times = {"ts": start_s * 1e6, "dur": took_s * 1e6}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": args or {}}


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
