"""Reading the clock inside a step, in the same way for recipes, peers, plain DDP and the bound."""

import resource
import time
from collections.abc import Iterable
from pathlib import Path

import torch


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
    """Largest resident size so far; a forked process starts with the modules that it was born with.

    From /proc where there is one: `ru_maxrss` survives exec, so a child starts with its launcher's figure.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
