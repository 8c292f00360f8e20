"""Environment variables that the library reads, and files that it writes for people.

Launchers set the variables. They take the names from here because the modules that read them load torch.
"""

import os
import re
import secrets
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OLDEST_TORCH = (2, 11)
"""The oldest version of torch that gradwire runs with, as pyproject.toml has it."""


def require_torch() -> None:
    """Raise `ImportError` if the installed torch is older than `OLDEST_TORCH`. Does not import it."""
    try:
        found = version("torch")
    except PackageNotFoundError:  # the import itself tells, or works by other means
        return
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and tuple(map(int, numbers.groups())) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"gradwire needs torch {oldest} or later, and {found} is installed: upgrade torch")


RANKS_HERE = "GRADWIRE_RANKS_HERE"
"""Number of ranks that share this rank's cores, where LOCAL_WORLD_SIZE does not tell: an emulated network
makes every rank a node, and gives it cores of its own where there are enough."""


def cores_per_rank() -> float | None:
    """This rank's share of the cores that it may use; `None` where nobody says how many ranks share them.

    `RANKS_HERE` says it, or torchrun's variable.
    """
    ranks = _ranks_here()
    return None if ranks is None else _cores() / max(1, int(os.environ[ranks]))


def cores_text() -> str:
    """Source of `cores_per_rank`, in words."""
    ranks = _ranks_here()
    if ranks is None:
        return f"neither LOCAL_WORLD_SIZE nor {RANKS_HERE} says how many ranks share the {_cores()} cores"
    return f"{os.environ[ranks]} ranks share {_cores()} cores by {ranks}"


def _ranks_here() -> str | None:
    """The variable that says how many ranks share the cores."""
    return next((name for name in (RANKS_HERE, "LOCAL_WORLD_SIZE") if os.environ.get(name)), None)


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


CONNECTIONS = "GRADWIRE_CONNECTIONS"
"""Number of connections between two ranks, the same on all of them. Without it they are measured."""

_MOST_CONNECTIONS = 64


def connections_asked() -> int | None:
    """The number in `CONNECTIONS`, or `None`. Raises `ValueError` if that is no number of connections."""
    text = os.environ.get(CONNECTIONS, "")
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_CONNECTIONS:
        raise ValueError(f"{CONNECTIONS}={text!r} is no whole number from 1 to {_MOST_CONNECTIONS}")
    return int(text)


TIMED_EVERY = "GRADWIRE_TIMED_EVERY"
"""One step in this many is timed and metered, where nothing goes by times. 1 means every step."""

_TIMED_EVERY = 16


def timed_every() -> int:
    """The number in `TIMED_EVERY`, or 16. Raises `ValueError` if that is no number of steps."""
    text = os.environ.get(TIMED_EVERY, "") or str(_TIMED_EVERY)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{TIMED_EVERY}={text!r} is no whole number of steps")
    return int(text)


COMPILES_FIRST = "GRADWIRE_COMPILE_FIRST"
"""1: `attach` compiles kernels that are missing before it returns. Else another process compiles them, and
the first gradients travel dense. For runs that are compared bit by bit, or timed from their first step on."""


def compiles_first() -> bool:
    """True if the variable `COMPILES_FIRST` asks for that."""
    return os.environ.get(COMPILES_FIRST) == "1"


CHECKS_KERNELS = "GRADWIRE_CHECK_KERNELS"
"""1: kernels that a plan has chosen check their arguments in every call. For tests, and new kernels."""


def checks_kernels() -> bool:
    """True if the variable `CHECKS_KERNELS` asks for checks."""
    return os.environ.get(CHECKS_KERNELS) == "1"


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` completely, or leave the old file: a full disk costs no earlier report.

    Raises `OSError`, which says so. A pipe, or anything else that is not an ordinary file, is written to
    directly.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")  # ranks may write to one name at once
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        told = f"{error.strerror}; what was there before is as it was"
        raise OSError(error.errno, told, str(path)) from error
