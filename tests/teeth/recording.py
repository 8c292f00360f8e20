"""Which functions each test enters, in all its threads and processes, and how long it takes.

A few files of tests are recorded in a process of their own, in a copy of the tree in which every function
notes that it is entered. Each tier is recorded as its command runs it: `make test-all` tries more rows.
Compiled functions cannot note anything: they count as entered with the plain ones of their file, and of files
that import it. A recording stays until its file of tests changes; remove the folder to record all anew.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from tests.support.source import MODULES, ROOT
from tests.teeth.copies import Copy, copied, dependents
from tests.teeth.mutants import COMPILED, room
from tests.teeth.recorder import FOLDER

FOLDERS = ("device", "faults", "golden", "house", "laws", "papers", "process", "soak", "unit")
"""Of `tests`: those that `make test-all` runs."""
RECORDED = ROOT / "out" / "teeth" / "recorded"
FASTEST = ROOT / "tests" / "teeth" / "fastest.json"
"""For trees without a recording: of each function the fastest tests that enter it, and no others."""
KEPT = 5
TOGETHER = 8
"""So many files of a folder share a process at most: it takes seconds to start, and what it recorded is lost
where it is broken off."""
WITHIN_S = 3600.0
"""The longest that such files may take."""
_COMPILERS = {"kernel", "inlined", "reordered", "jit"}
TIERS = ("test", "all")
ROWS = {"test": "few", "all": "sample"}
"""`GRADWIRE_LAWS` of each tier."""
TABLES = ("tests/device", "tests/laws", "tests/process/test_placement.py", "tests/unit/exchange")
"""All tests in these run in the last tier, too, in more rows than in the first."""


@dataclass(frozen=True)
class Item:
    """A test that passes in a tree without a fault."""

    test: str
    """As pytest calls it."""
    tier: str
    """One of `TIERS`."""
    seconds: float
    """With the fixtures that it shares with others."""
    functions: frozenset[str]
    """Those that it enters, and its fixtures."""
    collected: frozenset[str] = frozenset()
    """Those that are entered when its file and what that imports are loaded."""

    @property
    def file(self) -> str:
        """Its file, from the root of the tree."""
        return self.test.partition("::")[0]


def words(tier: str, file: str) -> list[str]:
    """Of pytest, for the tests of a file that a tier runs."""
    if tier == TIERS[0]:
        return ["-m", "not rest"]
    return [] if file.startswith(TABLES) else ["-m", "rest"]


def files(paths: Iterable[str] = ()) -> list[str]:
    """Files of tests in `paths`, all by default, from the root of the tree."""
    found: set[Path] = set()
    for path in [ROOT / each for each in paths] or [ROOT / "tests" / each for each in FOLDERS]:
        found |= {path} if path.is_file() else set(path.rglob("test_*.py"))
    return sorted(each.relative_to(ROOT).as_posix() for each in found)


def new(tests: Iterable[str]) -> list[str]:
    """The files, of these, that `fastest.json` does not name."""
    known = json.loads(FASTEST.read_text(encoding="utf-8"))["tests"]
    return [each for each in tests if each not in known]


def is_recorded(file: str, tier: str, folder: Path = RECORDED) -> bool:
    """Whether there is a recording of the file as it is."""
    path = _path(file, tier, folder)
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["digest"] == _digest(file)


def record(tests: Iterable[str], tier: str, folder: Path = RECORDED) -> Iterator[tuple[str, int, int]]:
    """Record these files of tests in a tier; of each how many tests there are and how many of them passed.

    (file, 0, 0) for one that has ended its process, or that has taken too long.
    """
    names, texts = instrumented()
    with copied(texts) as copy:
        copy.environment["GRADWIRE_LAWS"] = ROWS[tier]
        for together in _together(tests, tier):
            found = _recorded(copy, together, tier, names)
            if not found and len(together) > 1:  # one of them has ended the process
                found = {
                    file: each for file in together for each in _recorded(copy, [file], tier, names).values()
                }
            for file in together:
                packed = found.get(file, _packed([], {}, {}, names))
                path = _path(file, tier, folder)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"digest": _digest(file)} | packed), encoding="utf-8")
                yield file, len(packed["items"]), sum(each["passed"] for each in packed["items"])


def _together(tests: Iterable[str], tier: str) -> Iterator[list[str]]:
    """Files that share a process."""
    for _, alike in groupby(tests, lambda file: (Path(file).parent, words(tier, file))):
        while some := list(islice(alike, TOGETHER)):
            yield some


def _recorded(copy: Copy, together: Sequence[str], tier: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """By file; nothing if the process has not come to its end."""
    folder = copy.root.parent
    (folder / "now").write_bytes(bytes(4))
    (folder / "entries").write_bytes(b"")
    (folder / "found.json").unlink(missing_ok=True)
    copy.environment[FOLDER] = str(folder)
    plugins = ("-p", "no:cacheprovider", "-p", "tests.teeth.recorder")
    copy.run(["pytest", "-q", *plugins, *words(tier, together[0]), *together], WITHIN_S)
    if not (folder / "found.json").exists():
        return {}
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    entered: dict[int, set[int]] = {}
    for line in (folder / "entries").read_text().splitlines():
        time, function = map(int, line.split())
        entered.setdefault(time, set()).add(function)
    items: dict[str, list[dict[str, Any]]] = {file: [] for file in together}
    for item in found["items"]:
        items[item["test"].partition("::")[0]].append(item)
    return {file: _packed(each, found["seconds"], entered, names) for file, each in items.items()}


def _packed(
    items: list[dict[str, Any]],
    seconds: Mapping[str, float],
    entered: Mapping[int, set[int]],
    names: list[str],
) -> dict[str, Any]:
    """As it is written: each set of functions once, and functions by their place in a list."""
    sets: dict[frozenset[int], int] = {}
    packed = []
    for item in items:
        times = [item["time"], *item["shared"]]
        own = frozenset().union(*(entered.get(time, set()) for time in times))
        whole_s = item["seconds"] + sum(seconds[str(each)] for each in item["shared"])
        packed.append(
            {
                "test": item["test"],
                "seconds": round(whole_s, 4),
                "passed": item["passed"],
                "set": sets.setdefault(own, len(sets)),
            }
        )
    collected = entered.get(0, set())
    used = sorted(collected.union(*sets))
    place = {function: number for number, function in enumerate(used)}
    return {
        "items": packed,
        "functions": [names[function] for function in used],
        "sets": [sorted(place[function] for function in each) for each in sets],
        "collected": sorted(place[function] for function in collected),
    }


def recorded(folder: Path = RECORDED) -> list[Item]:
    """All tests of which there is a recording, and that passed in it."""
    items = []
    for tier in TIERS:
        for path in sorted((folder / tier).rglob("*.json")):
            found = json.loads(path.read_text(encoding="utf-8"))
            functions = found["functions"]
            *sets, collected = (
                frozenset(functions[place] for place in each) for each in (*found["sets"], found["collected"])
            )
            items += [
                Item(each["test"], tier, each["seconds"], sets[each["set"]], collected)
                for each in found["items"]
                if each["passed"]
            ]
    return items


def keep_fastest(folder: Path = RECORDED, to: Path = FASTEST) -> None:
    """Write which `KEPT` tests of the first tier are the fastest that enter each function.

    Of a test with parameters it is the fastest case that counts. A file of tests without a recording keeps
    what `to` says of it.
    """
    kept: dict[str, dict[str, Item]] = {}
    anew = {
        path.relative_to(folder / TIERS[0]).with_suffix(".py").as_posix()
        for path in (folder / TIERS[0]).rglob("*.json")
    }
    before = fastest(to) if to.exists() else []
    kept_before = [
        replace(each, functions=each.functions & _plain()) for each in before if each.file not in anew
    ]
    items = sorted(
        [*kept_before, *(each for each in recorded(folder) if each.tier == TIERS[0])],
        key=lambda each: each.seconds,
    )
    for of in (lambda item: item.functions, lambda item: item.collected):
        done = set(kept)
        for item in items:
            for function in of(item) - done:
                tests = kept.setdefault(function, {})
                if len(tests) < KEPT:
                    tests.setdefault(item.test.partition("[")[0], item)
    used = {item.test: item for tests in kept.values() for item in tests.values()}
    place = {test: number for number, test in enumerate(sorted(used))}
    # A file of which no test is among the fastest is known, too.
    known = json.loads(to.read_text(encoding="utf-8"))["tests"] if to.exists() else {}
    tests_of: dict[str, dict[str, float]] = {
        file: {} for file in sorted(anew.union(known)) if (ROOT / file).exists()
    }
    for test in place:
        file, _, name = test.partition("::")
        tests_of[file][name] = round(used[test].seconds, 2)
    functions_of: dict[str, dict[str, list[int]]] = {}
    for function in sorted(kept):
        path, _, name = function.partition(":")
        functions_of.setdefault(path, {})[name] = sorted(place[item.test] for item in kept[function].values())
    tests, functions = (
        ",\n".join(f"{_compact(path)}: {_compact(each)}" for path, each in of.items())
        for of in (tests_of, functions_of)
    )
    text = f'{{"tests": {{\n{tests}\n}}, "functions": {{\n{functions}\n}}}}\n'
    to.write_text(text, encoding="utf-8")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def fastest(path: Path = FASTEST) -> list[Item]:
    """What `keep_fastest` has written, of the tests that are still there."""
    found = json.loads(path.read_text(encoding="utf-8"))
    tests = [
        (f"{file}::{name}", seconds)
        for file, names in found["tests"].items()
        for name, seconds in names.items()
    ]
    enters: list[set[str]] = [set() for _ in tests]
    for file, functions in found["functions"].items():
        for name, places in functions.items():
            for place in places:
                enters[place].add(f"{file}:{name}")
    return [
        Item(test, TIERS[0], seconds, frozenset(functions))
        for (test, seconds), functions in zip(tests, enters, strict=True)
        if _is_there(test)
    ]


def _is_there(test: str) -> bool:
    file, _, name = test.partition("[")[0].partition("::")
    return name in _tests(file)


@cache
def _tests(file: str) -> frozenset[str]:
    """Names of the tests of a file."""
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return frozenset(re.findall(r"^def (test_\w+)", text, re.MULTILINE))


def covering(function: str, items: Iterable[Item]) -> list[Item]:
    """The tests that enter a function, given as `path:Class.method`, fastest first.

    After them come tests for which it is entered only when their file is loaded: they seldom notice.
    """
    wanted = {function} if function in _plain() else _nearest(function)
    found = [
        (each.functions.isdisjoint(wanted), each.seconds, each)
        for each in items
        if not (each.functions.isdisjoint(wanted) and each.collected.isdisjoint(wanted))
    ]
    return [each for *_, each in sorted(found, key=lambda row: row[:2])]


def beside(tests: Sequence[Item], items: Iterable[Item]) -> list[Item]:
    """The other `items` in the files of `tests`, fastest first.

    The few fastest tests that enter a function often pass by what it returns; a test of it stands near them.
    """
    files = {each.file for each in tests}
    others = [each for each in items if each.file in files and each not in tests]
    return sorted(others, key=lambda each: each.seconds)


def _nearest(function: str) -> set[str]:
    """Of a function that cannot say that it is entered: those that can, and stand for it.

    Where all functions of these files are compiled, those of the files of the same names in `kernels`, which
    call them.
    """
    path = function.partition(":")[0]
    if room(path) != COMPILED:
        return _plain_in({path})
    names = dependents({Path(path).stem})
    folders = (Path(path).parent, Path(path).parent.parent)
    near, far = (_plain_in({f"{folder}/{name}.py" for name in names}) for folder in folders)
    return near or far


def _plain_in(paths: Set[str]) -> set[str]:
    return {each for each in _plain() if each.partition(":")[0] in paths}


_known: list[str] = []


def _plain() -> frozenset[str]:
    """All functions that say that they are entered."""
    if not _known:
        _known.extend(instrumented()[0])
    return frozenset(_known)


def instrumented() -> tuple[list[str], dict[str, str]]:
    """Functions by the number that each says when it is entered, and the texts of files that do so."""
    names: list[str] = []
    texts = {}
    for module in MODULES:
        path = module.path.relative_to(ROOT).as_posix()
        lines = module.path.read_text(encoding="utf-8").splitlines(keepends=True)
        for line, column, name in sorted(_entries(module.tree), reverse=True):
            lines.insert(line - 1, f"{' ' * column}__entered__({len(names)})\n")
            names.append(f"{path}:{name}")
        if path == "src/gradwire/__init__.py":
            lines.insert(_after_docstring(module.tree), _PRELUDE)
        texts[path] = "".join(lines)
    return names, texts


_PRELUDE = """\
exec(
    __import__("pathlib").Path(__file__).parents[2].joinpath("tests/teeth/entered.py").read_text(),
    {"FOLDER": str(__import__("pathlib").Path(__file__).parents[3])},
)
"""


def _after_docstring(tree: ast.Module) -> int:
    return tree.body[0].end_lineno or 0


def _entries(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    """Where the body of each function begins, after its docstring: line, column and the function's name."""

    def within(node: ast.AST, name: str) -> Iterator[tuple[int, int, str]]:
        for each in ast.iter_child_nodes(node):
            inner = name
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{each.name}".lstrip(".")
                if not isinstance(each, ast.ClassDef) and not _is_compiled(each):
                    body = each.body[ast.get_docstring(each) is not None :]
                    if body and body[0].lineno > each.lineno and not _is_stub(body[0]):
                        decorators = [one.lineno for one in getattr(body[0], "decorator_list", ())]
                        yield min(body[0].lineno, *decorators, 10**9), body[0].col_offset, inner
            yield from within(each, inner)

    return within(tree, "")


def _is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        ast.unparse(each).partition("(")[0].rpartition(".")[2] in _COMPILERS
        for each in function.decorator_list
    )


def _is_stub(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _path(file: str, tier: str, folder: Path) -> Path:
    return (folder / tier / file).with_suffix(".json")


def _digest(file: str) -> str:
    return hashlib.blake2b((ROOT / file).read_bytes(), digest_size=8).hexdigest()
