"""Steps of GPT-2 beside DDP and torch's hooks, on one rank: `benchmarks/gpu_steps.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.gpu.outcomes import Tell, each
from tests.support.where import WHERE

TURNS = 5
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def run(tell: Tell, match: str | None = None) -> None:
    """The table, as one figure."""
    each(tell, {"steps of GPT-2": _table})


def _table() -> str:
    import gpu_steps

    where = torch.device(WHERE.type, 0) if WHERE.type == "cuda" else WHERE
    return gpu_steps.as_text(gpu_steps.alone(TURNS, where))
