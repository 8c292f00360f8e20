"""Imports go one way, and clocks and processes have their places."""

from __future__ import annotations

import ast

import pytest

from tests.house.source import MODULES, Module, imports

NUMBERS = {"plan", "adapt"}
CORE = {"kernels", "codec", "comm", "exchange", "memory", "metric", "moment", "errors", "arena"}
UPPER = CORE | NUMBERS | {"measure", "recipes"}
EVERYTHING = UPPER | {"ddp", "version", "emulate", ""}

# What a part may import of ours, beside itself. "" is the public surface, `import gradwire`.
ALLOWED: dict[str, set[str]] = {
    "": {"ddp", "recipes", "errors", "version"},
    "version": set(),
    "errors": set(),
    "moment": set(),
    "kernels": set(),
    "codec": {"errors", "kernels", "moment"},
    "comm": {"errors"},
    "memory": {"kernels"},
    "metric": {"kernels", "moment"},
    "exchange": {"codec", "comm.base", "errors", "kernels", "memory", "metric", "moment"},
    "arena": {"exchange.base", "kernels", "memory", "moment"},
    "plan": set(),
    "adapt": {"plan"},
    "measure": {
        "comm.base",
        "errors",
        "exchange.base",
        "exchange.late",
        "memory",
        "moment",
        "plan",
        "version",
    },
    "recipes": {"adapt", "arena", "codec", "comm.base", "exchange", "kernels", "memory", "moment", "plan"},
    "ddp": UPPER | {"version"},
    "emulate": {"errors"},
    "bench": EVERYTHING,
    "cli": EVERYTHING | {"bench"},
    "integrations": EVERYTHING - {"emulate"},
}


def part_of(name: str) -> str:
    """The part of the package that a module belongs to: `codec` for gradwire.codec.cast."""
    return ".".join(name.split(".")[1:2])


def is_allowed(target: str, allowed: set[str]) -> bool:
    inner = target.removeprefix("gradwire").removeprefix(".")
    if not inner:
        return "" in allowed
    return any(inner == name or inner.startswith(name + ".") for name in allowed if name)


every_module = pytest.mark.parametrize("module", MODULES, ids=str)


@every_module
def test_imports_go_one_way(module: Module) -> None:
    part = part_of(module.name)
    assert part in ALLOWED, f"{part} is new: say in {__name__} what it may import"
    for line, target in imports(module):
        if target.split(".")[0] == "gradwire" and not (part and part_of(target) == part):
            assert is_allowed(target, ALLOWED[part]), f"{module.path}:{line}: {part} may not import {target}"


@pytest.mark.parametrize("part", sorted(NUMBERS))
def test_numbers_only(part: str) -> None:
    for module in MODULES:
        if part_of(module.name) == part:
            outside = {target.split(".")[0] for _line, target in imports(module)}
            assert not outside & {"torch", "numba"}, f"{module} must see numbers only"


TALKS_TO_PEERS = {"comm", "ddp", "emulate", "bench", "cli", "integrations"}


@every_module
def test_only_one_part_below_the_hook_talks_to_peers(module: Module) -> None:
    if part_of(module.name) not in TALKS_TO_PEERS:
        reached = [target for _line, target in imports(module) if target.startswith("torch.distributed")]
        assert not reached, f"{module} goes around Comm"


CLOCKS = {"measure", "bench", "emulate", "cli"}


@every_module
def test_only_measuring_code_reads_a_clock(module: Module) -> None:
    if part_of(module.name) not in CLOCKS:
        for line, target in imports(module):
            assert target.split(".")[0] not in {"time", "timeit", "datetime"}, f"{module.path}:{line}"


@every_module
def test_imports_are_absolute(module: Module) -> None:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno}"


def test_the_rule_can_be_broken() -> None:
    assert not is_allowed("gradwire.ddp.engine", ALLOWED["exchange"])
    assert not is_allowed("gradwire.comm.threads", ALLOWED["exchange"])
    assert not is_allowed("gradwire.comm", ALLOWED["exchange"])
    assert not is_allowed("gradwire", ALLOWED["codec"])
    assert is_allowed("gradwire.comm.base", ALLOWED["exchange"])
