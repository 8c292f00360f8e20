"""Imports go one way, and clocks and processes have their places."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.support.source import MODULES, ROOT, Module, imports

NUMBERS = {"planning", "decide"}
CORE = {"kernels", "codec", "comm", "exchange", "memory", "metric", "moment", "errors", "arena", "placement"}
UPPER = CORE | NUMBERS | {"measure", "recipes"}
BELOW = UPPER | {"contrib", "engine", "sources", "tools", "checks", "telemetry", "unwrapping", "version"}
EVERYTHING = BELOW | {
    "advising",
    "attaching",
    "environment",
    "exploring",
    "local_steps",
    "quantities",
    "report",
    "scaling",
    "wire",
    "",
}

# What a part may import of ours, beside itself. "" is the public surface, `import gradwire`.
ALLOWED: dict[str, set[str]] = {
    "": {
        "advising",
        "attaching",
        "engine.layout",
        "errors",
        "exploring",
        "local_steps",
        "recipes",
        "report",
        "scaling",
        "version",
        "wire",
    },
    "version": set(),
    "errors": set(),
    "environment": set(),
    "quantities": set(),
    "moment": {"errors"},
    "kernels": {"environment"},
    "codec": {"errors", "kernels", "moment"},
    "comm": {"errors", "kernels"},
    "placement": {"comm.base", "errors"},
    "memory": {"kernels"},
    "metric": {"errors", "kernels", "moment"},
    "exchange": {"codec", "comm.base", "errors", "kernels", "memory", "metric", "moment"},
    "arena": {"exchange.base", "kernels", "memory", "moment"},
    "planning": set(),
    "decide": {"planning"},
    "measure": {
        "comm.base",
        "errors",
        "exchange.base",
        "memory",
        "moment",
        "planning",
        "version",
    },
    "recipes": {
        "arena",
        "codec",
        "comm.base",
        "decide",
        "exchange",
        "kernels",
        "memory",
        "moment",
        "planning",
        "quantities",
    },
    "contrib": {"codec", "comm.base", "errors", "exchange", "kernels", "memory", "moment", "recipes"},
    "engine": UPPER | {"environment", "quantities", "version"},
    # A source brings gradients to an engine; no source knows another.
    "sources": UPPER | {"checks", "engine", "unwrapping"},
    "unwrapping": set(),
    "checks": {"arena", "engine.layout", "errors", "exchange", "unwrapping"},
    "tools": UPPER | {"engine"},
    "telemetry": UPPER | {"engine", "environment", "sources"},
    "report": BELOW | {"quantities"},
    "wire": BELOW | {"report"},
    "attaching": BELOW | {"configuration", "placing", "wire"},
    "local_steps": BELOW | {"attaching", "configuration", "wire"},
    "placing": {"comm", "configuration", "engine.agree", "engine.worker", "errors", "placement"},
    "configuration": {"arena", "checks", "engine.guard", "engine.layout", "recipes", "sources", "version"},
    "advising": {"arena", "decide", "engine.forecast", "exchange.base", "planning", "quantities", "recipes"},
    "exploring": BELOW | {"wire"},
    "scaling": {"advising", "arena", "engine.forecast", "planning", "quantities", "recipes"},
    "integrations": EVERYTHING,
    "cli": EVERYTHING,
    "__main__": {"cli"},
    # The laboratory is a user of all that is above, and no line above names it.
    "lab": set(),
    "lab.emulate": {"comm.carried", "environment", "errors", "quantities"},
    "lab.data": set(),
    "lab.workloads": {"cli.named", "engine.layout", "lab.data", "planning"},
    "lab.bench": EVERYTHING | {"lab.emulate", "lab.workloads"},
    "lab.demo": EVERYTHING | {"lab.bench", "lab.emulate", "lab.workloads"},
    "lab.report": {"lab.bench", "lab.demo"},
    "lab.cli": {
        "cli.beforehand",
        "environment",
        "lab.bench",
        "lab.demo",
        "lab.emulate",
        "lab.report",
        "lab.workloads.spec",
    },
}


def part_of(name: str) -> str:
    """The part of the package that a module belongs to: `codec` for gradwire.codec.cast.

    The laboratory has parts of its own: `lab.demo` for gradwire.lab.demo.race.
    """
    parts = name.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["lab"] else 1])


def is_allowed(target: str, allowed: set[str]) -> bool:
    inner = target.removeprefix("gradwire").removeprefix(".")
    if not inner:
        return "" in allowed
    return any(inner == name or inner.startswith(name + ".") for name in allowed if name)


def test_imports_go_one_way() -> None:
    offences = []
    for module in MODULES:
        part = part_of(module.name)
        assert part in ALLOWED, f"{part} is new: say in {__name__} what it may import"
        for line, target in imports(module):
            outside = target.split(".")[0] == "gradwire" and not (part and part_of(target) == part)
            if outside and not is_allowed(target, ALLOWED[part]):
                offences.append(f"{module.path}:{line}: {part} may not import {target}")
    assert not offences


@pytest.mark.parametrize("part", sorted(NUMBERS))
def test_numbers_only(part: str) -> None:
    for module in MODULES:
        if part_of(module.name) == part:
            outside = {target.split(".")[0] for _line, target in imports(module)}
            assert not outside & {"torch", "numba"}, f"{module} must see numbers only"


def imported_outside(parts: set[str], unwanted: Callable[[str], bool]) -> list[str]:
    """Where other parts than these import what is unwanted there."""
    return [
        f"{module.path}:{line}: {target}"
        for module in MODULES
        if part_of(module.name) not in parts
        for line, target in imports(module)
        if unwanted(target)
    ]


LAB = {part for part in ALLOWED if part.startswith("lab")}
TALK_TO_PEERS = LAB | {
    "attaching",
    "comm",
    "engine",
    "local_steps",
    "placing",
    "sources",
    "tools",
    "wire",
    "exploring",
    "cli",
    "integrations",
}


def test_only_one_part_below_the_hook_talks_to_peers() -> None:
    assert not imported_outside(TALK_TO_PEERS, lambda target: target.startswith("torch.distributed"))


READ_CLOCKS = LAB | {"measure"}


def test_only_measuring_code_reads_a_clock() -> None:
    clocks = {"time", "timeit", "datetime"}
    assert not imported_outside(READ_CLOCKS, lambda target: target.split(".")[0] in clocks)


def test_only_the_table_of_commands_names_the_laboratory() -> None:
    inside = [module for module in MODULES if part_of(module.name) in LAB]
    naming = {module.name for module in MODULES if "gradwire.lab" in module.path.read_text(encoding="utf-8")}
    assert len(inside) > 10
    assert naming - {module.name for module in inside} == {"gradwire.cli.main"}


def test_imports_are_absolute() -> None:
    relative = [
        f"{module.path}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.level != 0
    ]
    assert not relative


def test_the_rule_can_be_broken() -> None:
    assert not is_allowed("gradwire.engine.engine", ALLOWED["exchange"])
    assert not is_allowed("gradwire.comm.threads", ALLOWED["exchange"])
    assert not is_allowed("gradwire.comm", ALLOWED["exchange"])
    assert not is_allowed("gradwire", ALLOWED["codec"])
    assert is_allowed("gradwire.comm.base", ALLOWED["exchange"])
    assert not is_allowed("gradwire.lab.emulate", ALLOWED["engine"])
    assert not is_allowed("gradwire.lab", ALLOWED["cli"])
    assert part_of("gradwire.lab.demo.race") == "lab.demo"
    assert part_of("gradwire.lab") == "lab"
    assert imported_outside(set(), lambda target: target == "time")


BENCHMARKS = tuple(Module(path) for path in sorted((ROOT / "benchmarks").glob("*.py")))


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda each: each.path.stem)
def test_what_benchmarks_import_of_ours_exists(benchmark: Module) -> None:
    # No test runs them, so a name that moves would be missed there until the next measurement.
    for node in ast.walk(benchmark.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradwire":
            module = import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}"), alias.name
