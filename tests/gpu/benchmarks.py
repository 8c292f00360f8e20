"""Figures of `benchmarks/gpu_kernels.py`. A goal that is missed is said, and fails nothing: it is a time."""

from __future__ import annotations

from functools import partial

import torch
from benchmarks import gpu_kernels

from tests.gpu.outcomes import Outcome, Tell, each

NUMEL = 100_000_000


def run(tell: Tell, match: str | None = None) -> None:
    """Each group on its own, so that one that fails leaves the others."""
    for name, measure in gpu_kernels.groups(NUMEL).items():
        each(tell, {f"{name} ran": partial(_told, tell, measure)})
        torch.cuda.empty_cache()


def _told(tell: Tell, measure: gpu_kernels.Measure) -> None:
    for figure in measure():
        tell(Outcome(figure.name, "passed", figure.text()))
