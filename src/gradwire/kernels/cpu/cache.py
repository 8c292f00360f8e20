"""Cache of compiled kernels for later processes: one file per kernel, types and processor.

Numba's own cache fails if nothing can be written, and on every damaged file. It notices changes in a kernel's
own file only. It has no lock: it numbers its entries in the order in which types come. Here the name of a
file says all that its code depends on. So no file is ever changed: it is written beside and moved into place,
and processes that compile the same kernel at once leave one whole file.

A folder named by all sources, with Numba's cache inside, was tried on Numba 0.68.1 (2026-11-27). It only
solves the changes in other files. When two processes compiled a kernel for int32 and for int64 at once, the
index led from int64 to the code for int32, and the next process raised `TypeError`. A truncated file raised
`UnpicklingError`, data and index alike. So the code below would be needed all the same.

A kernel that cannot be read is compiled again, and one that cannot be written is kept in memory: a cache
saves time and must never be a reason to fail. Like Numba, it obeys `NUMBA_CACHE_DIR` and not
`PYTHONDONTWRITEBYTECODE`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any
from uuid import uuid4

import llvmlite
import numba
import numpy as np
from numba.core import config as _numbas_config
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

_CONFIG: Any = _numbas_config  # filled from the environment, which no stub knows
_LOG = logging.getLogger("gradwire")

_PREFIX = "gradwire-kernels-"
_KEPT = 5
"""Folders kept when a new one is made: one per state of sources and options, some 10 MB each."""
_OPTIONS = ("BOUNDSCHECK", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT")
"""Options of Numba that change the compiled code."""
_SEAL = 16
"""Bytes of the hash in front of a file's content."""

Places = Callable[[], Sequence[Path]]


def places() -> list[Path]:
    """Folders where caches may lie: all are read, in this order; the first that is writable is written.

    `NUMBA_CACHE_DIR` alone if it is set; else the folder of the package's bytecode, then the user's cache.
    """
    if _CONFIG.CACHE_DIR:
        return [Path(_CONFIG.CACHE_DIR)]
    found = [Path(cache_from_source(__file__)).parent]
    with suppress(RuntimeError):  # a user without a home
        base = os.environ.get("XDG_CACHE_HOME")
        found.append((Path(base) if base else Path.home() / ".cache") / "gradwire")
    return found


def folder_name(sources: Path) -> str:
    """Name of a cache folder, made from hashes of all source files in `sources` and in the folder above, of
    versions and of options.

    All sources count for all kernels, because the code of a kernel contains that of the kernels it calls, and
    the constants of contracts, which lie above.
    """
    hashed = hashlib.blake2b(digest_size=12)
    options = [getattr(_CONFIG, name, None) for name in _OPTIONS]
    versions = numba.__version__, llvmlite.__version__, np.__version__, sys.version
    hashed.update(repr((versions, options)).encode())
    for path in sorted(each for folder in (sources.parent, sources) for each in folder.glob("[!.]*.py*")):
        hashed.update(f"\n{path.name} ".encode() + hashlib.blake2b(path.read_bytes()).digest())
    return _PREFIX + hashed.hexdigest()


_FOLDER = folder_name(Path(__file__).parent)
"""Name of this process's cache folder, fixed at import: later edits of sources do not change it."""


class KernelCache:
    """Cache of one kernel's code, as Numba expects it of a dispatcher (`numba.core.caching`).

    Raises `ValueError` for a closure: its code would depend on values that are not in its sources.
    """

    cache_path = None
    """`None`: Numba's statistics expect one folder, and there may be several."""

    def __init__(self, function: Callable[..., Any], folder: str = _FOLDER, where: Places = places) -> None:
        self._name = f"{function.__module__}.{function.__qualname__}"
        if function.__closure__ is not None:
            raise ValueError(f"{self._name} holds values that its sources do not tell")
        self._folder, self._where = folder, where

    def has(self, sig: object, target_context: Any) -> bool:
        """True if there is a file for the types `sig`. It is not read."""
        return any(path.exists() for path in self._paths(sig, target_context))

    def _paths(self, sig: object, target_context: Any) -> list[Path]:
        name = self._file_name(sig, target_context.codegen())
        return [place / self._folder / name for place in self._where()]

    def load_overload(self, sig: object, target_context: Any) -> Any:
        """Load the `CompileResult` for the types `sig`; `None` if there is no usable one."""
        target_context.refresh()
        for path in self._paths(sig, target_context):
            try:
                if not _is_safe(path.parent):
                    continue
                content = path.read_bytes()
            except OSError:
                continue
            try:
                return CompileResult._rebuild(target_context, *pickle.loads(_unsealed(content)))
            except Exception as error:
                # What is compiled takes its place.
                _LOG.warning("kernel cache: %s is thrown away, its kernel compiled anew: %s", path, error)
        return None

    def save_overload(self, sig: object, data: Any) -> None:
        """Store the `CompileResult` for the types `sig`, if a folder is writable."""
        if data.library.has_dynamic_globals:
            return  # it contains addresses of this process
        folder, name = writable(self._folder, self._where), self._file_name(sig, data.codegen)
        if folder is None or not _write(folder / name, _sealed(dumps(data._reduce()))):
            _say_once(", ".join(map(str, self._where())))

    def flush(self) -> None:
        """Do nothing: no file is ever out of date."""

    def _file_name(self, sig: object, codegen: Any) -> str:
        # Types come as text from `prepared`, and as a tuple from whatever calls the kernel.
        types = normalize_signature(sig)[0]
        depends = repr((self._name, str(types), codegen.magic_tuple()))
        short = ".".join(self._name.split(".")[-2:]).replace("<", "").replace(">", "")
        return f"{short}-{hashlib.blake2b(depends.encode(), digest_size=12).hexdigest()}"


def writable(folder: str = _FOLDER, where: Places = places) -> Path | None:
    """Find or make the first cache folder that can be written; `None` if there is none."""
    for place in where():
        found = place / folder
        try:
            if not found.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                found.mkdir(mode=0o755, exist_ok=True)
                _drop_oldest(place)
            if _is_safe(found) and os.access(found, os.W_OK):
                return found
        except OSError:
            continue
    return None


def _is_safe(folder: Path) -> bool:
    """True if only this user, root and the owner of these sources can write to `folder`. Its code will be
    executed.
    """
    if not hasattr(os, "getuid"):
        return True
    found = folder.lstat()
    owners = {os.getuid(), 0, Path(__file__).stat().st_uid}
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_uid in owners and not found.st_mode & others


def _drop_oldest(place: Path) -> None:
    """Delete the oldest cache folders in `place`, down to `_KEPT`. Running processes compile again kernels
    not yet loaded.
    """
    with suppress(OSError):
        found = sorted(place.glob(_PREFIX + "*"), key=lambda each: each.stat().st_mtime_ns)
        for each in found[:-_KEPT]:
            shutil.rmtree(each, ignore_errors=True)


def _write(path: Path, content: bytes) -> bool:
    beside = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        # Whatever the umask: nobody else may write, and everybody may read what root has prepared.
        with open(beside, "xb", opener=partial(os.open, mode=0o644)) as file:
            file.write(content)
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        return False
    return True


def _sealed(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SEAL).digest() + content


def _unsealed(sealed: bytes) -> bytes:
    content = sealed[_SEAL:]
    if _sealed(content) != sealed:
        raise ValueError("it is damaged")
    return content


@cache
def _say_once(tried: str) -> None:
    _LOG.info("compiled kernels are kept in memory only: nothing could be written to %s", tried)
