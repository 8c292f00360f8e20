"""How large the tree is, and how many doors a gradient passes: prints a table.

    .venv/bin/python -m benchmarks.house [TREE]

The table is that of another checkout where one is named, so that two can be laid side by side. Files and
functions are those in src; blank lines within docstrings count as blank. A step is the seventh of
rank 0 of two over gloo, of three linear layers under DDP; what the thread that trains and gradwire's own
threads call of gradwire counts, generated code and each resumption of a generator included. A callback that
torch's thread runs does not, so that up to five functions come and go with the time a collective takes. Files
do not, and nothing is a limit: figures that were goals were met while the path got longer.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RECIPES = ("dense", "topk", "powersgd", "gcomp")
WARM_STEPS = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Step(NamedTuple):
    """What one step of a recipe opens and calls, and how many modules `attach` had loaded for it."""

    modules: int
    files: int
    functions: int
    calls: int


def traced(source: Path, recipe: str) -> Step:
    """A step of `recipe` on the first of two ranks, by the package under `source`."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, spawn) as pool:
        first, _second = pool.map(partial(_rank, f"{folder}/store", source, recipe), range(2))
    return first


def _rank(store: str, source: Path, recipe: str, rank: int) -> Step:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path.insert(0, str(source))
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradwire

    seen, counts = Counter[tuple[str, str]](), False

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if counts and event == "call" and code.co_filename.startswith(str(source)):
            seen[code.co_filename, code.co_qualname] += 1

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)  # so small that every step is finite
    threading.setprofile(note)
    sys.setprofile(note)
    wire = gradwire.attach(model, optimizer, recipe)
    modules = sum(name.split(".")[0] == "gradwire" for name in sys.modules)
    for step in range(WARM_STEPS + 1):
        counts = step == WARM_STEPS
        optimizer.zero_grad()
        model(torch.randn(8, 256)).sum().backward()
        optimizer.step()
    counts = False
    sys.setprofile(None)
    wire.detach()
    dist.destroy_process_group()
    return Step(modules, len({path for path, _ in seen}), len(seen), seen.total())


def kinds(text: str) -> Counter[str]:
    """How many lines of a file are code, docstrings, blank, imports, and comments alone."""
    kind = {}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import() | ast.ImportFrom():
                name = "imports"
            case ast.Expr(value=ast.Constant(value=str())):
                name = "docstring"
            case _:
                continue
        kind |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), name)
    found = Counter[str]()
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        found[(bare and kind.get(number, "comment" if bare[0] == "#" else "code")) or "blank"] += 1
    return found


def comments(path: Path) -> int:
    """Comments in a file that are not orders to a tool."""
    with tokenize.open(path) as file:
        found = [
            token.string
            for token in tokenize.generate_tokens(file.readline)
            if token.type == tokenize.COMMENT
        ]
    return sum(not text.startswith(("# noqa", "# type:")) for text in found)


def doubled(classes: list[ast.ClassDef]) -> list[str]:
    """Names of classes that occur more than once in src."""
    return sorted(name for name, times in Counter(each.name for each in classes).items() if times > 1)


def spread(lengths: list[int]) -> str:
    """Their median, 90th percentile and maximum."""
    return f"{median(lengths):.0f} / {quantiles(lengths, n=10)[-1]:.0f} / {max(lengths)}"


def sizes(tree: Path) -> Iterator[tuple[str, object]]:
    """The rows for which nothing is run."""
    texts = {path: path.read_text(encoding="utf-8") for path in (tree / "src").rglob("*.py")}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in nodes if isinstance(node, Function)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    kind = sum((kinds(text) for text in texts.values()), Counter[str]())
    data = sum("dataclass" in ast.unparse(mark) for each in classes for mark in each.decorator_list)
    protocols = sum("Protocol" in ast.unparse(base) for each in classes for base in each.bases)
    twice = doubled(classes)
    yield "files / lines in src", f"{len(lines)} / {sum(lines.values()):,}"
    names = ("code", "docstring", "blank", "imports", "comment")
    yield f"of these {' / '.join(names)}", " / ".join(f"{kind[name]:,}" for name in names)
    yield "file median / p90 / max", spread([*lines.values()])
    yield "function median / p90 / max (with docstring)", spread(lengths)
    share = sum(map(comments, texts)) / sum(lines.values())
    yield "comments per line (inline ones counted)", f"{share:.3f}"
    yield "classes (dataclasses, protocols)", f"{len(classes)} ({data}, {protocols})"
    yield "class names that occur twice or more", f"{len(twice)}: {', '.join(twice)}"
    tests = [path.read_text(encoding="utf-8") for path in (tree / "tests").rglob("*.py")]
    functions = sum(text.count("\ndef test_") + text.count("    def test_") for text in tests)
    length = sum(len(text.splitlines()) for text in tests)
    yield "tests: files / lines / functions", f"{len(tests)} / {length:,} / {functions:,}"


def main(tree: Path = ROOT) -> None:
    """Print one row for each figure."""
    for name, value in sizes(tree):
        print(f"| {name} | {value} |")
    steps = {recipe: traced(tree / "src", recipe) for recipe in RECIPES}
    for recipe, (_modules, files, functions, calls) in steps.items():
        print(f"| step of {recipe}: files / functions / calls | {files} / {functions} / {calls:,} |")
    modules = " / ".join(str(step.modules) for step in steps.values())
    print(f"| modules loaded by attach: {' / '.join(steps)} | {modules} |")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
