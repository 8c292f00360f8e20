"""The machine that a measurement was made on."""

import os
import platform
from datetime import UTC, datetime
from typing import Any

import torch

from gradwire.measure.machine import cores, processor
from gradwire.version import __version__


def machine() -> dict[str, Any]:
    """Processor, cores, memory (bytes), versions and the date (UTC)."""
    return {
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradwire": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
