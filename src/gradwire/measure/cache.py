"""Cache of measured numbers on disk, for the next run on the same machine.

Each key has a small JSON file under `$XDG_CACHE_HOME/gradwire` (`~/.cache/gradwire`). A file is written
beside its destination and moved there, so that ranks which write at the same time leave a complete one. An
unreadable entry counts as absent, and an entry that cannot be written is dropped: a cache saves time and must
never cause a failure.
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
    """Properties of this process that a cached time depends on."""
    return {
        "processor": processor(),
        "cores": str(cores()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "numba": numba_version(),
        "gradwire": __version__,
    }


def numba_version() -> str:
    """Version of numba, without importing it; a rank on a device may not need numba."""
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
