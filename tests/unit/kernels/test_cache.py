"""Compiled kernels between processes: found, thrown away, or done without.

Each `fresh` dispatcher stands for another process: it has compiled nothing yet.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from gradwire.kernels.cpu import cache
from gradwire.kernels.cpu.cache import KernelCache, folder_name, places, writable
from tests.support.source import SRC

FOLDER = folder_name(Path(__file__).parent)


def half(x: float) -> float:
    """A kernel."""
    return x / 2


def first(x: Any) -> float:
    """A kernel whose types are written in two ways."""
    return float(x[0])


def fresh(*where: Path, function: Callable[..., Any] = half, folder: str = FOLDER) -> Any:
    kernel = numba.njit(function)
    kernel._cache = KernelCache(function, folder, lambda: where)
    return kernel


def hits(kernel: Any) -> int:
    return sum(kernel.stats.cache_hits.values())


def files(place: Path) -> list[Path]:
    return sorted((place / FOLDER).iterdir())


def sealed(content: bytes) -> bytes:
    """A file that no byte of which is damaged."""
    return hashlib.blake2b(content, digest_size=16).digest() + content


def test_what_is_in_the_cache_is_known_without_loading_it(tmp_path: Path) -> None:
    one, other = fresh(tmp_path), fresh(tmp_path)
    assert not other._cache.has("(float64,)", other.targetctx)
    one.compile("(float64,)")
    assert other._cache.has("(float64,)", other.targetctx)
    assert not other._cache.has("(int64,)", other.targetctx)
    assert hits(other) == 0


def test_types_name_one_file_whether_declared_or_called_with(tmp_path: Path) -> None:
    """If another kernel called it first, a kernel was lacking for ever: declared types had another file."""
    one, other = (fresh(tmp_path, function=first) for _ in range(2))
    assert one(np.ones(2)) == 1.0
    assert other._cache.has("(float64[::1],)", other.targetctx)
    other.compile("(float64[::1],)")
    assert hits(other) == 1


def test_what_one_process_has_compiled_another_loads(tmp_path: Path) -> None:
    # They begin with different types, and none has seen the other's.
    assert (fresh(tmp_path)(3.0), fresh(tmp_path)(3)) == (1.5, 1.5)
    assert len(files(tmp_path)) == 2
    other = fresh(tmp_path)
    assert (other(3), other(5.0), other(1j)) == (1.5, 2.5, 0.5j)
    assert hits(other) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda _: b"",
        lambda whole: bytes(len(whole)),
        lambda whole: whole.replace(b".text", b".test"),  # in the object code
        sealed,
    ],
    ids=["cut", "empty", "garbage", "one letter", "of another kind"],
)
def test_a_damaged_file_is_thrown_away_and_compiled_anew(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    fresh(tmp_path)(3.0)
    [path] = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    found = fresh(tmp_path)
    assert found(3.0) == 1.5
    assert hits(found) == 0
    [said] = caplog.records
    assert said.levelno == logging.WARNING
    assert str(path) in said.getMessage()
    whole = fresh(tmp_path)
    assert whole(3.0) == 1.5
    assert hits(whole) == 1
    assert len(caplog.records) == 1


def test_where_nothing_can_be_written_kernels_stay_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.touch()
    caplog.set_level(logging.INFO, "gradwire")
    kernel = fresh(taken, taken / "inside")
    assert (kernel(3.0), kernel(3)) == (1.5, 1.5)
    [said] = caplog.records  # not for each kernel
    assert said.levelno == logging.INFO
    assert str(taken) in said.getMessage()
    assert fresh()(3.0) == 1.5


def test_the_next_place_serves_where_the_first_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    where = tmp_path / "file", tmp_path / "other"
    fresh(*where)(3.0)
    assert len(files(tmp_path / "other")) == 1
    found = fresh(*where)
    assert found(3.0) == 1.5
    assert hits(found) == 1


def test_code_that_others_can_replace_is_not_run(tmp_path: Path) -> None:
    fresh(tmp_path / "first")(3.0)
    (tmp_path / "first" / FOLDER).chmod(0o775)
    kernel = fresh(tmp_path / "first", tmp_path / "other")
    assert kernel(3.0) == 1.5
    assert hits(kernel) == 0
    assert len(files(tmp_path / "other")) == 1


def test_nobody_else_can_write_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        fresh(tmp_path)(3.0)
    finally:
        os.umask(before)
    [path] = files(tmp_path)
    assert path.parent.stat().st_mode & 0o777 == 0o755
    assert path.stat().st_mode & 0o777 == 0o644


def test_few_folders_stay(tmp_path: Path) -> None:
    names = []
    for age in range(8):  # one for each state of the sources
        sources = tmp_path / str(age)
        sources.mkdir()
        (sources / "kernels.py").write_text(f"# {age}")
        names.append(folder_name(sources))
        old = tmp_path / "cache" / names[-1]
        old.mkdir(parents=True)
        os.utime(old, (1000 - age, 1000 - age))
    (tmp_path / "cache" / "of somebody else").mkdir()
    assert writable(FOLDER, lambda: [tmp_path / "cache"]) == tmp_path / "cache" / FOLDER
    kept = {each.name for each in (tmp_path / "cache").iterdir()}
    assert kept == {"of somebody else", FOLDER, *names[:4]}


def test_what_the_sources_do_not_tell_is_refused() -> None:
    held = 2.0
    with pytest.raises(ValueError, match="sources"):
        KernelCache(lambda x: x * held)


def test_an_edit_in_a_callees_file_reaches_its_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, names = tmp_path / "edited", ("edited.callee", "edited.caller", "edited")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "caller.py").write_text(
        "from edited.callee import more\n\ndef kernel(x):\n    return more(x) * 2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def another_process(more: str) -> Any:
        (package / "callee.py").write_text(
            f"import numba\n\n@numba.njit\ndef more(x):\n    return x + {more}\n"
        )
        importlib.invalidate_caches()
        for name in names:
            sys.modules.pop(name, None)
        function = importlib.import_module("edited.caller").kernel
        return fresh(tmp_path / "cache", function=function, folder=folder_name(package))

    assert another_process("1.0")(1.0) == 4.0
    same, edited = another_process("1.0"), another_process("10.0")
    assert (same(1.0), hits(same)) == (4.0, 1)
    assert (edited(1.0), hits(edited)) == (22.0, 0)
    for name in names:
        sys.modules.pop(name, None)


def test_constants_of_the_contracts_above_are_part_of_kernels(tmp_path: Path) -> None:
    (sources := tmp_path / "cpu").mkdir()
    (contract := tmp_path / "contract.py").write_text("BITS = 11")
    before = folder_name(sources)
    contract.write_text("BITS = 12")
    assert folder_name(sources) != before


def test_other_options_are_other_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = folder_name(tmp_path)
    assert folder_name(tmp_path) == before
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    assert folder_name(tmp_path) != before


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    beside = Path(cache.__file__).parent / "__pycache__"
    assert places() == [beside, tmp_path / "gradwire"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places() == [beside, tmp_path / ".cache" / "gradwire"]
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert places() == [tmp_path]


PROGRAM = """
import os
before = dict(os.environ)
from gradwire.kernels.cpu import huffman, jit
from gradwire.kernels.cpu.cache import places, writable
assert huffman.quarter(32) == 8
assert jit.compiled_s() > 0.0
assert writable() is None, places()
assert os.environ == before  # where a user's own kernels go is the user's business
"""


def test_kernels_work_where_nothing_can_be_written(tmp_path: Path) -> None:
    kernels = tmp_path / "gradwire" / "kernels"
    shutil.copytree(SRC / "gradwire" / "kernels", kernels, ignore=lambda *_: ["__pycache__"])
    # Without the rest, which takes seconds to import.
    (kernels.parent / "__init__.py").touch()
    shutil.copy(SRC / "gradwire" / "environment.py", kernels.parent)
    # Root may write anywhere, but not below a file.
    for taken in (kernels / "cpu" / "__pycache__", tmp_path / "home"):
        taken.touch()
    unset = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
