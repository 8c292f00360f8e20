"""Are means, memories and kept state of every recipe bit for bit those of another commit?

    python -m tests.golden.same HEAD~1

Both trees run four steps of every recipe on worlds of 1 to 4 (`steps.py`), at the same time on this
machine. The other commit is unpacked into a temporary folder and must have `tests/golden/steps.py`. Ends
with 1 and names the settings if any hash differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TREE = Path(__file__).parents[2]


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The files of a commit in a folder that goes afterwards; the repository is not touched."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=TREE, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def started(tree: Path) -> subprocess.Popen[str]:
    """The hashes of a tree, being computed by its own code."""
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    command = [sys.executable, "-m", "tests.golden.steps"]
    return subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)


def hashes(process: subprocess.Popen[str]) -> dict[str, list[str]]:
    """By setting, step by step."""
    printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"one of the trees failed with exit status {process.returncode}")
    rows = [line.split("\t") for line in printed.splitlines()]
    return {setting: of_steps for setting, *of_steps in rows}


def main() -> None:
    """Compare, print what differs, and say so by the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("commit", help="the commit to compare the working tree with")
    with checked_out(parser.parse_args().commit) as other:
        running = [started(TREE), started(other)]
        here, there = (hashes(process) for process in running)
    differing = [name for name in here.keys() & there.keys() if here[name] != there[name]]
    alone = sorted(here.keys() ^ there.keys())
    print(
        *(f"differs: {name}" for name in sorted(differing)),
        *(f"in one tree only: {name}" for name in alone),
        sep="\n",
    )
    print(
        f"{len(here.keys() & there.keys()) - len(differing)} settings are the same, {len(differing)} differ"
    )
    raise SystemExit(1 if differing or alone else 0)


if __name__ == "__main__":
    main()
