"""Spans of one training step: when this rank computed, and when its gradients were on the wire."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from gradwire.lab.bench.trainer import Trainer

Span = dict[str, Any]
"""{"what": "backward" | "encode" | "wire" | "decode" | "wait", "unit", "start_s", "stop_s"}, seconds from the
start of the step's backward pass."""


def record(trainer: Trainer, steps: int) -> list[Span]:
    """Train `steps` more steps ; the spans of the last one. Every rank must call it."""
    if trainer.wire is not None:
        _train(trainer, steps)
        account = trainer.report(timeline=True) or {}
        return list(account["timeline"])
    probe = _BucketProbe()
    if isinstance(trainer.module, DistributedDataParallel) and trainer.hook_clock is None:
        # DDP takes one hook in its life, so this ends the hookless setting's comparison: trace it last.
        trainer.module.register_comm_hook(None, probe.all_reduce)
    start_s, backward_s, exposed_s = _train(trainer, steps, probe)
    return [
        {"what": "backward", "unit": "", "start_s": 0.0, "stop_s": backward_s},
        *probe.spans(start_s),
        {"what": "wait", "unit": "", "start_s": backward_s, "stop_s": backward_s + exposed_s},
    ]


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


def _train(trainer: Trainer, steps: int, probe: _BucketProbe | None = None) -> tuple[float, float, float]:
    """Start of the last step's backward on this process's clock, and its two parts (seconds)."""
    result = (0.0, 0.0, 0.0)
    for _ in range(steps):
        if probe is not None:
            probe.reset()
        sample = trainer.step()
        start_s = trainer.clock.last_s - sample.backward_s
        result = (start_s, sample.backward_s, sample.exposed_comm_s)
    return result
