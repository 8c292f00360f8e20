"""The events of one trace that say what a step waits for. All others are dropped as they are read."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.advise import kineto
from gradwire.advise.spans import Spans, ordered, union

ACCUMULATE = "torch::autograd::AccumulateGrad"
NODE = "autograd::engine::evaluate_function"
KERNEL = "kernel"
COPIES = ("gpu_memcpy", "gpu_memset", "gpu_user_annotation")
"""Categories of what runs on a GPU and is no kernel: copies, and ranges of the CPU once more."""
NCCL_KERNELS = ("nccldevkernel", "ncclkernel", "nccl_")

ON_HOST = ("cpu_op", "user_annotation", "python_function")
RECORDED_S = (1e-6, 3e-6)
"""Processor time that it takes to record an event of the CPU, without and with its shapes. Found with torch
2.13, a transformer of 2,900 events in a step and a small convolutional network."""

MOST_ELEMENTS = 1 << 50
"""Bound of elements, more than any tensor has: a larger number is damaged."""

_ELEMENT_BYTES = {"double": 8, "long": 8, "long int": 8, "int64": 8}
_ELEMENT_BYTES |= dict.fromkeys(("half", "c10::half", "float16", "bfloat16", "c10::bfloat16"), 2)
_ELEMENT_BYTES |= dict.fromkeys(("unsigned char", "signed char", "byte", "char", "bool", "uint8"), 1)


class Sum(NamedTuple):
    """An all-reduce that was called, or began, at `at_s`.

    `size_bytes` and `took_s` are `nan` where they were not recorded; `group` is the name of its group.
    """

    at_s: float
    size_bytes: float
    took_s: float
    group: str


class RecordedGather(NamedTuple):
    """An all-gather that began at `at_s`, of `size_bytes` from this rank; fields as in `Sum`."""

    at_s: float
    size_bytes: float
    took_s: float
    element_bytes: int


class Gradient(NamedTuple):
    """A gradient that was added to its parameter's, from `start_s` to `stop_s`."""

    start_s: float
    stop_s: float
    shape: tuple[int, ...] | None
    element_bytes: int


class Recorded:
    """One trace. All times are in seconds on its own clock.

    `collectives` and `kernels` are disjoint spans: of gloo's on the CPU, or NCCL's on a GPU, and of all other
    kernels, without copies. `nodes_s` are the times at which autograd began with a node, and `calls_s` those
    at which a collective began. `recording_s` is the processor time that recording has taken. `invalid`
    events were no JSON, and are left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._flat: dict[str, array[float]] = {}
        self.sums: list[Sum] = []
        self.gathers: list[RecordedGather] = []
        self.gradients: list[Gradient] = []
        self.is_sharded, self.recording_s = False, 0.0
        header, self.invalid = kineto.read(path, self._take)
        info = header.get("distributedInfo")
        self.info: dict[str, Any] = info if isinstance(info, dict) else {}
        self.sums.sort()
        self.gradients.sort(key=lambda each: each.stop_s)
        self.on_gpu = bool(self._flat.get("nccl"))
        self.collectives = union(self._spans("nccl" if self.on_gpu else "gloo"))
        self.calls_s = self._spans("called" if self.on_gpu else "gloo")[:, 0]
        self.kernels = union(self._spans("kernel"))
        self.nodes_s = self._spans("node")[:, 0]
        self.added_s = self._spans("added")[:, 1]
        self.forwards, self.optimizers = self._spans("forward"), self._spans("optimizer")
        self.profiled, self.loaded = self._spans("profiled"), union(self._spans("loaded"))
        self._flat.clear()

    def _spans(self, kind: str) -> Spans:
        return ordered(self._flat.get(kind, array("d")))

    def _take(self, event: kineto.Event) -> None:
        name = event.get("name")
        if event.get("ph") != "X" or not isinstance(name, str):
            return
        args = event.get("args", {})
        if event.get("cat") in ON_HOST:
            self.recording_s += RECORDED_S[isinstance(args, dict) and "Input Dims" in args]
        kind = _kind_of(name, event.get("cat"))
        if not kind:
            return
        try:
            start_s = float(event["ts"]) * 1e-6
            stop_s = start_s + float(event.get("dur", 0.0)) * 1e-6
        except (KeyError, TypeError, ValueError, OverflowError):
            start_s = stop_s = math.nan
        if not math.isfinite(start_s) or not start_s <= stop_s < math.inf or not isinstance(args, dict):
            raise ValueError(f"it is damaged: of the event {name[:60]!r} times or arguments cannot be read")
        if kind == "gradient":
            self.gradients.append(Gradient(start_s, stop_s, *_first_tensor(args)))
            kind = "added"
        elif kind == "counted":
            self._counted(start_s, args)
            return
        elif kind == "sharded":
            self.is_sharded = True
            return
        elif kind == "gloo" and name == "gloo:all_gather":
            shape, element_bytes = _first_tensor(args)
            size_bytes = math.nan if shape is None else float(math.prod(shape) * element_bytes)
            self.gathers.append(RecordedGather(start_s, size_bytes, stop_s - start_s, element_bytes))
        elif kind == "gloo" and name == "gloo:all_reduce":
            shape, element_bytes = _first_tensor(args)
            size_bytes = math.nan if shape is None else float(math.prod(shape) * element_bytes)
            if size_bytes != 0.0:  # nothing is sent for an empty tensor
                self.sums.append(Sum(start_s, size_bytes, stop_s - start_s, ""))
        elif name.startswith(NODE) and name.endswith(ACCUMULATE):
            self._flat.setdefault("added", array("d")).extend((start_s, stop_s))
        self._flat.setdefault(kind, array("d")).extend((start_s, stop_s))

    def _counted(self, at_s: float, args: dict[str, Any]) -> None:
        """Record a call of NCCL at `at_s`. An all-reduce is also added to `sums`.

        `args` are those of the event: its verb, elements, type and group. The duration is not known here.
        """
        verb, numel = str(args.get("Collective name", "")).lower(), args.get("In msg nelems")
        if verb in ("", "wait", "barrier", "init"):
            return
        self._flat.setdefault("called", array("d")).extend((at_s, at_s))
        if verb.startswith("allreduce") and numel != 0:
            size_bytes = math.nan
            if isinstance(numel, int) and 0 < numel < MOST_ELEMENTS:
                size_bytes = float(numel * _bytes_of(args.get("dtype")))
            self.sums.append(Sum(at_s, size_bytes, math.nan, str(args.get("Process Group Name", ""))))
        elif verb.strip("_").startswith("allgather") and isinstance(numel, int) and 0 < numel < MOST_ELEMENTS:
            element_bytes = _bytes_of(args.get("dtype"))
            self.gathers.append(RecordedGather(at_s, float(numel * element_bytes), math.nan, element_bytes))


_STARTS: dict[str, str] = {
    NODE: "node",
    "gloo:": "gloo",
    "DistributedDataParallel.forward": "forward",
    "Optimizer.step#": "optimizer",
    "ProfilerStep#": "profiled",
    "enumerate(DataLoader)#": "loaded",
    "FSDP::": "sharded",
}
"""The kinds of events, by how their names begin."""


def _kind_of(name: str, category: object) -> str:
    """The kind of an event, by its name and category; empty for an event that is dropped."""
    if category == KERNEL:
        return "nccl" if name.lower().startswith(NCCL_KERNELS) else "kernel"
    if category in COPIES:
        return ""
    if name == ACCUMULATE:
        return "gradient"
    if name == "record_param_comms":
        return "counted"
    return next((kind for start, kind in _STARTS.items() if name.startswith(start)), "")


def _first_tensor(args: dict[str, Any]) -> tuple[tuple[int, ...] | None, int]:
    """Shape and bytes per element of an operator's first input; no shape where none was recorded."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    shape = dims[0] if isinstance(dims, list) and dims else None
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        return None, 4
    if math.prod(shape) >= MOST_ELEMENTS:
        return None, 4
    return tuple(shape), _bytes_of(types[0] if isinstance(types, list) and types else "float")


def _bytes_of(kind: object) -> int:
    return _ELEMENT_BYTES.get(str(kind).lower(), 4)
