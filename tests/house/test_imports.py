"""Imports go one way, and clocks and processes have their places."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.support.source import MODULES, ROOT, Module, imports

CONTROL_NUMBERS = {
    f"control.{name}" for name in ("choice", "flexible", "health", "lateness", "profiler", "timed_merge")
}
NUMBERS = {"planning"} | CONTROL_NUMBERS
GROUND = {"errors", "granularity", "kernels", "memory", "metric", "step.context"}
CORE = GROUND | {"codec", "comm", "exchange", "placement", "step.arena"}
UPPER = CORE | NUMBERS | {"measure", "recipes"}
STEP = UPPER | {"agreement", "checkpoint.shards", "step"}
ENGINE = STEP | {"control", "step.engine"}
BELOW = ENGINE | {
    "_api.checks",
    "_api.connections",
    "_api.prepare",
    "_api.unwrap",
    "agreement.guard",
    "checkpoint",
    "contrib",
    "sources",
    "telemetry",
    "telemetry.event_log",
    "telemetry.history",
    "tools",
    "version",
}
SURFACE = {f"_api.{name}" for name in ("attach", "explore", "outer", "plan", "report", "simulate", "wire")}
EVERYTHING = BELOW | SURFACE | {"environment", "quantities", ""}

# What a part may import of ours, beside itself. "" is the public surface, `import gradwire`. A file that has
# a line of its own belongs to no other part, and must be named where it may be imported.
ALLOWED: dict[str, set[str]] = {
    "": SURFACE | {"errors", "recipes", "step", "step.arena", "version"},
    "version": set(),
    "errors": set(),
    "environment": set(),
    "quantities": set(),
    "granularity": set(),
    "kernels": {"environment"},
    "step.context": {"errors", "granularity"},
    "codec": {"errors", "kernels", "step.context"},
    "comm": {"errors", "kernels"},
    "placement": {"comm.base", "errors", "granularity"},
    "memory": {"kernels"},
    "metric": {"errors", "kernels", "step.context"},
    "exchange": GROUND | {"codec", "comm.base"},
    "step.arena": {"exchange.base", "kernels", "memory", "step.context"},
    "planning": set(),
    **{name: {"planning"} for name in CONTROL_NUMBERS},
    "measure": GROUND - {"kernels", "metric"} | {"comm.base", "exchange.base", "planning", "version"},
    "recipes": CORE - {"errors", "comm", "metric", "placement"} | NUMBERS | {"comm.base", "quantities"},
    "contrib": GROUND - {"metric"} | {"codec", "comm.base", "exchange", "recipes"},
    "agreement": {"comm", "errors", "measure.clock"},
    "agreement.guard": STEP,
    "checkpoint.shards": {"agreement", "comm", "step.arena", "step.context"},
    "step": UPPER | {"agreement", "checkpoint.shards"},
    "control": STEP | {"environment"},
    "step.engine": STEP | {"control"},
    "checkpoint": STEP | {"step.engine"},
    "telemetry.history": STEP,
    "telemetry.event_log": STEP | {"quantities", "step.engine", "version"},
    # A source brings gradients to an engine; no source knows another.
    "sources": STEP
    | {"_api.checks", "_api.unwrap", "step.engine", "telemetry.event_log", "telemetry.history"},
    "tools": ENGINE,
    "telemetry": ENGINE | {"environment", "sources", "telemetry.history"},
    "_api": set(),
    "_api.unwrap": set(),
    "_api.checks": {"_api.unwrap", "errors", "exchange", "recipes", "step", "step.arena"},
    "_api.connections": {"comm", "environment", "errors", "measure", "planning"},
    "_api.prepare": STEP,
    "_api.switch": STEP | {"step.engine"},
    "_api.report": BELOW | {"quantities"},
    "_api.wire": BELOW | {"_api.report", "_api.switch"},
    "_api.configuration": {
        "_api.checks",
        "agreement.guard",
        "environment",
        "recipes",
        "sources",
        "step",
        "step.arena",
        "version",
    },
    "_api.transports": {
        "_api.configuration",
        "agreement",
        "comm",
        "errors",
        "placement",
        "step",
    },
    "_api.attach": BELOW | {"_api.configuration", "_api.transports", "_api.wire"},
    "_api.outer": BELOW | {"_api.attach", "_api.configuration", "_api.wire"},
    "_api.explore": BELOW | {"_api.wire"},
    "_api.plan": {"control", "exchange.base", "planning", "quantities", "recipes", "step.arena"} | NUMBERS,
    "_api.simulate": {"_api.plan", "control", "planning", "quantities", "recipes", "step.arena"},
    "integrations": EVERYTHING,
    "cli": EVERYTHING,
    "__main__": {"cli"},
    # The laboratory is a user of all that is above, and no line above names it.
    "lab": set(),
    "lab.emulate": {"environment", "errors", "quantities"},
    "lab.data": set(),
    "lab.workloads": {"cli.user_code", "lab.data", "planning", "step"},
    "lab.bench": EVERYTHING | {"lab.emulate", "lab.workloads"},
    "lab.demo": EVERYTHING | {"lab.bench", "lab.emulate", "lab.workloads"},
    "lab.report": {"lab.bench", "lab.demo", "recipes"},
    "lab.cli": {
        "cli.prerequisites",
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

    Files with a line of their own are parts: `step.engine`. So are the folders of the laboratory.
    """
    first, *more = name.split(".")[1:] or [""]
    inner = ".".join([first, *more[:1]])
    return inner if inner in ALLOWED else first


def is_allowed(target: str, allowed: set[str]) -> bool:
    inner = target.removeprefix("gradwire").removeprefix(".")
    if not inner:
        return "" in allowed
    named = {name for name in allowed if inner == name or inner.startswith(name + ".")}
    return any(len(name) >= len(part_of(target)) for name in named if name)


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


ENGINE_PARTS = {part for part in ALLOWED if part.partition(".")[0] in ("step", "control")}
NAMED = {f"gradwire.recipes.{name}" for name in ("base", "dense", "drain", "parse", "regroup")} | {
    f"gradwire.exchange.{name}" for name in ("base", "compose", "dense", "state")
}


def test_the_engine_names_no_recipe_and_no_exchange_but_dense() -> None:
    named = {
        (module.name, target)
        for module in MODULES
        if part_of(module.name) in ENGINE_PARTS
        for _line, target in imports(module)
        if target.startswith(("gradwire.recipes.", "gradwire.exchange.", "gradwire.contrib"))
    }
    assert len(named) > 5
    assert [each for each in named if each[1] not in NAMED] == []


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
    "_api.attach",
    "_api.connections",
    "_api.explore",
    "_api.outer",
    "_api.transports",
    "_api.wire",
    "agreement",
    "checkpoint.shards",
    "cli",
    "comm",
    "integrations",
    "sources",
    "step",
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
    assert not is_allowed("gradwire.step.engine", ALLOWED["exchange"])
    assert not is_allowed("gradwire.step.engine", ALLOWED["step"])
    assert not is_allowed("gradwire.control.choice", {"control"})
    assert not is_allowed("gradwire.comm.threads", ALLOWED["exchange"])
    assert not is_allowed("gradwire.comm", ALLOWED["exchange"])
    assert not is_allowed("gradwire", ALLOWED["codec"])
    assert is_allowed("gradwire.comm.base", ALLOWED["exchange"])
    assert not is_allowed("gradwire.lab.emulate", ALLOWED["step.engine"])
    assert not is_allowed("gradwire.lab", ALLOWED["cli"])
    assert part_of("gradwire.lab.demo.race") == "lab.demo"
    assert part_of("gradwire.lab") == "lab"
    assert part_of("gradwire.step.engine") == "step.engine"
    assert part_of("gradwire.step.layout") == "step"
    assert part_of("gradwire") == ""
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
