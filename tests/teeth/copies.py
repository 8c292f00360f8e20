"""Copies of the tree with other texts in some files, and processes in them.

A copy has folders of its own for temporary files, and for kernels where it changes them. So nothing that a
fault writes meets the next one.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gradwire.kernels.cpu.cache import folder_name, places
from tests.support.depth import DEPTHS
from tests.support.source import MODULES, ROOT, imports

PARTS = ("src", "tests", "examples", "docs", "benchmarks", ".ci", ".github")
CPU = "gradwire.kernels.cpu"
_SOURCES = Path("src", *CPU.split("."))


@dataclass(frozen=True)
class Copy:
    """`root` of a copy, and the variables of processes that run in it."""

    root: Path
    environment: dict[str, str]

    def run(self, words: Sequence[str], within_s: float) -> int | None:
        """The exit code of `python -m WORDS`, which is negative for a signal; `None` if it took longer.

        What it started is ended with it. Its output is in `output`.
        """
        asked = {
            "module": words[0],
            "words": words[1:],
            "root": str(self.root),
            "environment": self.environment,
            "output": str(self.output),
        }
        questions, answers = _starter().stdin, _starter().stdout
        assert questions is not None
        assert answers is not None
        questions.write(json.dumps(asked).encode() + b"\n")
        number = int(answers.readline())
        has_ended = False
        try:
            has_ended = bool(select.select([answers], [], [], within_s)[0])
            return int(answers.readline()) if has_ended else None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(number, signal.SIGKILL)
            if not has_ended:
                answers.readline()

    @property
    def output(self) -> Path:
        """What the last process wrote."""
        return self.root.parent / "output"


@cache
def _starter() -> subprocess.Popen[bytes]:
    """The process whose forks run; it ends with this one."""
    path = Path(__file__).with_name("starter.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    starter = subprocess.Popen([sys.executable, path], bufsize=0, env=environment, stdin=pipe, stdout=pipe)
    atexit.register(_end, starter)
    return starter


def _end(starter: subprocess.Popen[bytes]) -> None:
    starter.kill()
    with starter:  # closes its pipes, and waits
        pass


@contextmanager
def copied(texts: Mapping[str, str], recompiled: Sequence[str] = ()) -> Iterator[Copy]:
    """A copy of the tree in which the files at `texts` (from the root) have these texts.

    `recompiled` are the paths of sources of kernels whose code is another in the copy. Kernels that do not
    use them are taken from the cache.
    """
    with tempfile.TemporaryDirectory(prefix="teeth-", ignore_cleanup_errors=True) as name:
        root, temporary = Path(name, "tree"), Path(name, "tmp")
        temporary.mkdir()
        for part in PARTS:
            # Bytecode comes along, and stays valid, because times are kept.
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("gradwire-kernels-*"))
        for path in ROOT.iterdir():
            if path.is_file() and path.name != ".git":
                shutil.copy2(path, root)
        for path, text in texts.items():
            (root / path).write_text(text, encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{root}:{root / 'src'}",
            "TMPDIR": str(temporary),
            "NUMBA_CACHE_DIR": str(_kernels(root, recompiled)),
            "GRADWIRE_LAWS": DEPTHS[0],
            "GRADWIRE_LAWS_SEED": "0",  # the same rows as in the recording
        }
        for variable in ("PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE"):
            environment.pop(variable, None)
        yield Copy(root, environment)


def _kernels(root: Path, recompiled: Sequence[str]) -> Path:
    """Where the copy finds compiled kernels.

    The cache names a folder by the sources of all kernels, and a new folder replaces the oldest of five. So a
    copy with other sources of kernels gets a place of its own, with the kernels that have not changed.
    """
    ours, name = folder_name(ROOT / _SOURCES), folder_name(root / _SOURCES)
    place = places()[0]
    if name == ours:
        return place
    folder = root.parent / "kernels" / name
    folder.mkdir(parents=True, mode=0o755)
    changed = dependents({Path(path).stem for path in recompiled})
    for kept in (place / ours).glob("*"):
        if kept.name.partition(".")[0] not in changed:
            shutil.copy2(kept, folder)
    return folder.parent


def dependents(subjects: set[str]) -> set[str]:
    """Files of `kernels/cpu` that import one of `subjects`, directly or not, and these themselves."""
    found = set(subjects)
    while more := {name for name, used in _uses().items() if used & found} - found:
        found |= more
    return found


@cache
def _uses() -> dict[str, set[str]]:
    """Which files of `kernels/cpu` each of them imports."""
    return {
        module.path.stem: {
            name.removeprefix(f"{CPU}.").split(".")[0]
            for _, name in imports(module)
            if name.startswith(f"{CPU}.")
        }
        for module in MODULES
        if module.name.startswith(f"{CPU}.")
    }
