"""Figures of `benchmarks/gpu_host_time.py`. A goal that is missed is said, and fails nothing."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.gpu.outcomes import Outcome, Tell, each

TURNS = 5
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts there import each other


def run(tell: Tell, match: str | None = None) -> None:
    """Steps and the host's time beside DDP's and those of torch's hooks."""
    each(tell, {"host time ran": partial(_told, tell)})


def _told(tell: Tell) -> None:
    import gpu_host_time

    for figure in gpu_host_time.figures(TURNS):
        tell(Outcome(figure.name, "passed", figure.text()))
