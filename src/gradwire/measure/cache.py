"""Measured numbers on disk, for the next run on the same machine.

One small JSON file per key under `$XDG_CACHE_HOME/gradwire` (`~/.cache/gradwire`), written beside and moved
into place, so that ranks which store at once leave one whole file. An entry that cannot be read counts as
absent, and one that cannot be written is not kept: a cache saves time and must never be a reason to fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path

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
        "numba": numba_version(),
        "gradwire": __version__,
    }


def numba_version() -> str:
    """Without importing it, which a rank on a device can do without."""
    try:
        return version("numba")
    except PackageNotFoundError:
        return "none"


Key = Mapping[str, str]
Numbers = Mapping[str, float]


def folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradwire"


def path_of(key: Key) -> Path:
    digest = hashlib.blake2b(json.dumps(dict(key), sort_keys=True).encode(), digest_size=12).hexdigest()
    return folder() / f"{digest}.json"


def load(key: Key) -> dict[str, float] | None:
    """The value stored under `key`; `None` if there is none that can be trusted."""
    try:
        found = json.loads(path_of(key).read_text(encoding="utf-8"))
        if found["key"] != dict(key):
            return None
        numbers = {name: float(number) for name, number in found["numbers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError):
        return None
    return numbers if all(map(isfinite, numbers.values())) else None


def store(key: Key, numbers: Numbers) -> bool:
    """Keep `numbers` under `key`; whether that was possible."""
    text = json.dumps({"key": dict(key), "numbers": dict(numbers)}, indent=1)
    try:
        path = path_of(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            os.unlink(beside)
        return False
    return True
