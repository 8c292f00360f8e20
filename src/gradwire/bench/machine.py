"""The machine that a measurement was made on."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gradwire.version import __version__


def machine() -> dict[str, Any]:
    """Processor, cores, memory (bytes), versions and the date (UTC)."""
    return {
        "processor": _processor(),
        "cores": _cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradwire": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cores() -> int:
    """Cores that this process may use; not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
