"""What a measured time depends on besides what was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numba
import torch

from gradwire.version import __version__


def processor() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use; not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fingerprint() -> dict[str, str]:
    """All that a cached time must have in common with this process."""
    return {
        "processor": processor(),
        "cores": str(cores()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "gradwire": __version__,
    }
