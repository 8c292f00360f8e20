"""Are means, memory and bytes of every recipe bit for bit those of another commit?

    python -m tests.golden.same HEAD~1
    python -m tests.golden.same HEAD~1 topk "covap, measuring" --worlds 2 3 --scenes turns

Both source trees run the settings of this tree's `steps.py`, at the same time on this machine. Of the other
commit only `src` is unpacked, into a temporary folder. Names of recipes, their texts, or labels of
`tests/support/recipes.py` choose settings, also those that switch to such a recipe. Where anything differs,
it names recipe, world, scene and step, and ends with 1. A setting that raises the same error in both trees
is named, too, because what would follow is not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from tests.golden.steps import BY_THE_CLOCK, SCENES, WORLDS, Row, Setting, settings
from tests.support.recipes import EVERY_RECIPE

TREE = Path(__file__).parents[2]
KERNELS = Path(tempfile.gettempdir()) / "gradwire-golden-kernels"
"""Where compiled kernels of all trees are kept from one run to the next, unless NUMBA_CACHE_DIR says it."""

Found = dict[Setting, list[dict[str, Any]]]


@contextmanager
def unpacked(commit: str) -> Iterator[Path]:
    """The folder `src` of a commit in a folder that goes afterwards; the repository is not touched."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "src"], cwd=TREE, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder) / "src"


def chosen(names: Sequence[str], worlds: Sequence[int], scenes: Sequence[str]) -> list[Setting]:
    """The settings in which one of the recipes runs that are named; all, without names."""
    texts = [text for label, text in EVERY_RECIPE.items() if label not in BY_THE_CLOCK]
    wanted = {*names, *(EVERY_RECIPE[name] for name in names if name in EVERY_RECIPE)}

    def runs(text: str) -> bool:
        parts = text.split(" > ")
        return not wanted or any(each in wanted or each.split("(")[0] in wanted for each in parts)

    return [
        each
        for each in settings(texts)
        if runs(each.text) and each.world in worlds and (not scenes or each.scene in scenes)
    ]


def rows_of(source: Path, todo: Sequence[Setting]) -> Found:
    """All rows of the settings with the package in `source`, moment by moment."""
    environment = {"NUMBA_CACHE_DIR": str(KERNELS)} | os.environ
    environment["PYTHONPATH"] = f"{source}{os.pathsep}{TREE}"
    command = [sys.executable, "-m", "tests.golden.steps"]
    ran = subprocess.run(
        command,
        cwd=TREE,
        env=environment,
        input=json.dumps(todo),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: Found = {each: [] for each in todo}
    for line in ran.stdout.splitlines():
        row = json.loads(line)
        found[Setting(*row.pop("setting"))].append(row)
    return found


def difference(here: Sequence[dict[str, Any]], there: Sequence[dict[str, Any]]) -> str:
    """The first moment at which rows differ, in what, and on which ranks; empty if they do not."""
    for one, other in zip(here, there, strict=False):
        if one["moment"] != other["moment"]:
            return f"{_moment(one)}; there {_moment(other)}"
        kinds = [kind for kind in Row._fields if one.get(kind) != other.get(kind)]
        if kinds:
            return f"{one['moment']}: " + "; ".join(_told(kind, one, other) for kind in kinds)
    return "" if len(here) == len(there) else f"{len(here)} moments; there {len(there)}"


def _moment(row: dict[str, Any]) -> str:
    raised = next(filter(None, row.get("raised", ())), "")
    return f"{row['moment']}: {raised}" if raised else str(row["moment"])


def _told(kind: str, one: dict[str, Any], other: dict[str, Any]) -> str:
    mine, theirs = one[kind], other[kind]
    ranks = [rank for rank in range(len(mine)) if mine[rank] != theirs[rank]]
    what = f"{kind} of rank {', '.join(map(str, ranks))}"
    is_hash = kind in ("means", "memory")
    return what if is_hash else f"{what} ({mine[ranks[0]]}; there {theirs[ranks[0]]})"


def main() -> None:
    """Compare, print what differs, and say so by the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("commit", help="the commit to compare the working tree with")
    parser.add_argument("recipes", nargs="*", help="compare only these")
    parser.add_argument("--worlds", nargs="+", type=int, choices=WORLDS, default=WORLDS)
    parser.add_argument("--scenes", nargs="+", choices=list(SCENES), default=())
    arguments = parser.parse_args()
    todo = chosen(arguments.recipes, arguments.worlds, arguments.scenes)
    if not todo:
        raise SystemExit("no setting has such recipes, worlds and scenes")
    found: dict[str, Found] = {}

    def run(name: str, source: Path) -> None:
        found[name] = rows_of(source, todo)

    with unpacked(arguments.commit) as other:
        trees = [Thread(target=run, args=each) for each in (("here", TREE / "src"), ("there", other))]
        for each in trees:
            each.start()
        for each in trees:
            each.join()
    if len(found) < len(trees):
        raise SystemExit("one of the trees could not be run")
    differing = 0
    for setting in todo:
        told = difference(found["here"][setting], found["there"][setting])
        differing += bool(told)
        if told:
            print(f"differs: {setting} | {told}")
        elif "raised" in (last := found["here"][setting][-1]):
            print(f"raises alike, and ends there: {setting} | {_moment(last)}")
    print(f"{len(todo) - differing} settings are the same, {differing} differ")
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
