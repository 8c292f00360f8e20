"""What all tests share: one thread per rank, and the seed of the sampled laws in the header."""

from __future__ import annotations

import os
import random

import pytest
import torch

# Set before workers of pytest-xdist start, so that all of them sample the same rows.
os.environ.setdefault("GRADWIRE_LAWS_SEED", str(random.SystemRandom().randrange(10**6)))

# Ranks are threads: a pool of more threads under each of them only makes them wait for each other.
torch.set_num_threads(1)


def pytest_report_header() -> str:
    """How to run the same sample of the laws again."""
    if os.environ.get("GRADWIRE_LAWS") == "full":
        return "laws: in full"
    seed = os.environ["GRADWIRE_LAWS_SEED"]
    return f"laws: pairwise sample, repeat it with GRADWIRE_LAWS_SEED={seed} (GRADWIRE_LAWS=full for all)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist, what starts processes of its own runs in turn on one worker, the rest beside it."""
    for item in items:
        folder = item.path.parent.name
        group = "processes" if folder in ("process", "faults") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
