"""How large the tree is, and how many doors a gradient passes: prints a table.

    .venv/bin/python -m benchmarks.house

Files and functions are those of src/gradwire. A function's length is counted without its docstring. A step
is the third of the test rig's engine on two ranks: sources, the wrapper and the network are not in it, and
comprehensions, lambdas and generated code count with functions. Nothing here depends on time.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from pathlib import Path
from statistics import median, quantiles
from types import FrameType

from tests.house.test_loading import ATTACHED
from tests.support.rig import Rig, gradients
from tests.support.source import MODULES, SRC, functions

from gradwire.comm import Comm, run_ranks

WARM_STEPS = 2


def doors(recipe: str) -> tuple[int, int]:
    """Files and functions of gradwire that rank 0 enters in one step of `recipe`."""

    def run(comm: Comm) -> tuple[int, int]:
        rig, seen = Rig(comm, recipe), set[tuple[str, int]]()
        for step in range(WARM_STEPS):
            rig.step(gradients(comm.rank, step))

        def note(frame: FrameType, event: str, _argument: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(str(SRC)):
                seen.add((code.co_filename, code.co_firstlineno))

        grads = gradients(comm.rank, WARM_STEPS)
        sys.setprofile(note)
        try:
            rig.step(grads)
        finally:
            sys.setprofile(None)
        return len({path for path, _line in seen}), len(seen)

    return run_ranks(2, run)[0]


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How long it is beside its docstring, which a public function needs."""
    total = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is None or first.end_lineno is None:
        return total
    return total - (first.end_lineno - first.lineno + 1)


def comments(path: Path) -> int:
    """Comments in a file that are not orders to a tool."""
    with tokenize.open(path) as file:
        found = [
            token.string
            for token in tokenize.generate_tokens(file.readline)
            if token.type == tokenize.COMMENT
        ]
    return sum(not text.startswith(("# noqa", "# type:")) for text in found)


def loaded() -> int:
    """Modules of gradwire in a process that has attached `dense`."""
    done = subprocess.run([sys.executable, "-c", ATTACHED], capture_output=True, check=True, text=True)
    return done.stdout.count('"gradwire')


def main() -> None:
    """Print one row for each figure."""
    files = [len(module.path.read_text(encoding="utf-8").splitlines()) for module in MODULES]
    lengths = [_lines(function) for module in MODULES for function in functions(module.tree)]
    share = sum(comments(module.path) for module in MODULES) / sum(files)
    p90 = quantiles(lengths, n=10)[-1]
    rows = {
        "files": len(files),
        "lines": sum(files),
        "median / largest file": f"{median(files):.0f} / {max(files)}",
        "function median / p90 / max": f"{median(lengths):.0f} / {p90:.0f} / {max(lengths)}",
        "comments per line": f"{share:.3f}",
        "modules loaded by attach(dense)": loaded(),
    }
    for recipe in ("topk", "dense"):
        rows[f"files / functions in a step of {recipe}"] = "{} / {}".format(*doors(recipe))
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
