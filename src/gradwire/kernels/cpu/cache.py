"""Where compiled kernels are kept for the next process: one file per kernel, types and processor.

Numba's own cache fails where nothing can be written and on every damaged file, notices changes in a kernel's
own file only, and has no lock: it numbers what it stores in the order in which types come. Here the name of a
file says all that the code in it depends on. So nothing is ever changed: a file is written beside and moved
into place, and processes that compile the same kernel at once leave one whole file.

A folder that is named by all sources, with Numba's cache inside, was tried on Numba 0.68.1 (2026-11-27). It
mends the changes in other files, and nothing else. When two processes compiled a kernel for int32 and for
int64 at once, the index led from int64 to the code for int32, and the next process raised `TypeError`. A file
of which half was left raised `UnpicklingError`, data and index alike. So it needs what is below all the same.

A kernel that cannot be read is compiled anew, and one that cannot be written is kept in memory: a cache saves
time and must never be a reason to fail. As Numba, it heeds `NUMBA_CACHE_DIR` and not
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

_CONFIG: Any = _numbas_config  # filled from the environment, which no stub knows
_LOG = logging.getLogger("gradwire")

_PREFIX = "gradwire-kernels-"
_KEPT = 5
"""Folders that stay where a new one is made: one for each state of sources and options, some 10 MB each."""
_OPTIONS = ("BOUNDSCHECK", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT")
"""Of Numba's, those that change what it compiles."""
_SEAL = 16
"""Bytes of the hash in front of a file's content."""

Places = Callable[[], Sequence[Path]]


def places() -> list[Path]:
    """Where a cache may be: read in this order, and written to the first that can be.

    `NUMBA_CACHE_DIR` alone where it is set; else beside the package's bytecode, then in the user's cache.
    """
    if _CONFIG.CACHE_DIR:
        return [Path(_CONFIG.CACHE_DIR)]
    found = [Path(cache_from_source(__file__)).parent]
    with suppress(RuntimeError):  # a user without a home
        base = os.environ.get("XDG_CACHE_HOME")
        found.append((Path(base) if base else Path.home() / ".cache") / "gradwire")
    return found


def folder_name(sources: Path) -> str:
    """A name that differs when a source file in `sources`, a compiler or an option does.

    All sources count for all kernels, because a kernel's code contains that of those it calls.
    """
    hashed = hashlib.blake2b(digest_size=12)
    options = [getattr(_CONFIG, name, None) for name in _OPTIONS]
    versions = numba.__version__, llvmlite.__version__, np.__version__, sys.version
    hashed.update(repr((versions, options)).encode())
    for path in sorted(sources.glob("[!.]*.py*")):
        hashed.update(f"\n{path.name} ".encode() + hashlib.blake2b(path.read_bytes()).digest())
    return _PREFIX + hashed.hexdigest()


_FOLDER = folder_name(Path(__file__).parent)
"""From the time of import on: these are the sources that this process runs."""


class KernelCache:
    """A dispatcher's cache as Numba expects it (`numba.core.caching`), for one kernel.

    The kernel's code must follow from its sources: raises `ValueError` for a closure.
    """

    cache_path = None
    """Numba's statistics name a folder; here there may be several."""

    def __init__(self, function: Callable[..., Any], folder: str = _FOLDER, where: Places = places) -> None:
        self._name = f"{function.__module__}.{function.__qualname__}"
        if function.__closure__ is not None:
            raise ValueError(f"{self._name} holds values that its sources do not tell")
        self._folder, self._where = folder, where

    def load_overload(self, sig: object, target_context: Any) -> Any:
        """The `CompileResult` for the types `sig`; `None` when there is none that can be used."""
        target_context.refresh()
        name = self._file_name(sig, target_context.codegen())
        for path in (place / self._folder / name for place in self._where()):
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
        """Keep the `CompileResult` for the types `sig`, where that is possible."""
        if data.library.has_dynamic_globals:
            return  # it contains addresses of this process
        folder, name = writable(self._folder, self._where), self._file_name(sig, data.codegen)
        if folder is None or not _write(folder / name, _sealed(dumps(data._reduce()))):
            _say_once(", ".join(map(str, self._where())))

    def flush(self) -> None:
        """Nothing: no file is ever out of date."""

    def _file_name(self, sig: object, codegen: Any) -> str:
        depends = repr((self._name, str(sig), codegen.magic_tuple()))
        short = ".".join(self._name.split(".")[-2:]).replace("<", "").replace(">", "")
        return f"{short}-{hashlib.blake2b(depends.encode(), digest_size=12).hexdigest()}"


def writable(folder: str = _FOLDER, where: Places = places) -> Path | None:
    """The folder that kernels are written to, made where it is missing; `None` where nothing can be."""
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
    """Whether only this user, root and the owner of these sources can write there: its code will be run."""
    if not hasattr(os, "getuid"):
        return True
    found = folder.lstat()
    owners = {os.getuid(), 0, Path(__file__).stat().st_uid}
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_uid in owners and not found.st_mode & others


def _drop_oldest(place: Path) -> None:
    """Processes that still use what goes here compile again what they have not loaded yet."""
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
