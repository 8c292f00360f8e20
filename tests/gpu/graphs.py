"""Captured kernels beside eager ones, on NCCL ranks that share one GPU; over gloo on the CPU."""

from __future__ import annotations

import time

from tests.gpu.outcomes import Tell
from tests.gpu.ranks import judged, use_backend
from tests.gpu.scenes_graphs import SCENES
from tests.gpu.worlds import told_by_worlds

WITHIN_S = 85.0
"""Of the 95 s of the part."""


def run(tell: Tell, match: str | None = None) -> None:
    """Bits first, and then the host's time."""
    use_backend()
    names = [name for name in SCENES if match is None or match in name]
    told_by_worlds(tell, "tests.gpu.scenes_graphs", 2, names, judged, time.monotonic() + WITHIN_S)
