"""Every kernel compiled for GPUs that this machine need not have: no spills, vectors, exact arithmetic."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from tests.support.depth import FEW, FULL, drawn
from tests.support.looped import looped
from tests.support.source import MODULES

pytest.importorskip("triton", reason="kernels for devices need Triton")

from tests.device.calls import CALLS

pytestmark = pytest.mark.rest

Facts = Mapping[str, Any]
# Kernels and calls that need no vectors: addresses are any, as where rows of an odd number of chunks begin or
# bits, or bytes few, such as candidates of a top-k.
WITHOUT_VECTORS = {
    "compensate_unaligned",
    "_chunk_maxima",
    "_poison",
    "_tally",
    "_measure_widths",
    "_pack_widths",
    "_add_widths",
    "_zero_idle",
    "_join",
    "_split",
    "_set_levels",
    "_set_steps",
    "_pack_places",
    "_unpack_places",
    "_add_places",
    "_take",
    "_scatter",
    "_begin_search",
    "_count_kept",
    "_write_kept",
    "_add_strips",
    "_orthonormalise",
}


TRIED = tuple(drawn((call.__name__ for call in CALLS), 5, "compiled"))


@cache
def compiled(
    target: str, calls: str = "tests.device.calls", names: tuple[str, ...] = TRIED
) -> tuple[Facts, ...]:
    """What a process without an interpreter, and with an empty cache of its own, says of each kernel."""
    command = [sys.executable, "-m", "tests.device.compiling", target, calls, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(line) for line in done.stdout.splitlines())


def faults(kernel: Facts) -> set[str]:
    """What is wrong with a compiled kernel."""
    found = set(kernel["forbidden"])
    found |= {key for key in ("stack", "local") if kernel[key]}
    if not kernel["vectors"] and not {kernel["call"], kernel["name"]} & WITHOUT_VECTORS:
        found.add("no vectors")
    return found


@looped("target", ["sm_90", *(["sm_80"] if FULL else [])])
def test_no_kernel_spills_or_rounds_otherwise(target: str) -> None:
    wrong = {(each["call"], each["name"]): faults(each) for each in compiled(target) if faults(each)}
    assert wrong == {}


@looped("target", ["sm_90", *(["sm_80", "gfx942"] if FULL else [])])
def test_programs_release_what_they_wrote_before_they_are_counted(target: str) -> None:
    counting = compiled(target, names=("topk", "places", "compensate_marked"))
    found = {each["name"] for each in counting if each["releases"]}
    assert found == {"_sift", "_pack_places", "_unpack_places", "_compensate_marked"}


def launched() -> set[str]:
    """The kernels that are launched anywhere, by name; the others are parts of them."""
    return {
        ast.unparse(node.args[0])
        for module in MODULES
        if module.name.startswith("gradwire.kernels.device.")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch"
    }


def test_every_kernel_is_among_them() -> None:
    found = {each["name"] for each in compiled("sm_90")}
    assert set() < found <= launched()
    assert FEW or found == launched()


@pytest.mark.full
def test_all_of_them_compile_for_another_maker() -> None:
    assert {each["name"] for each in compiled("gfx942")} == {each["name"] for each in compiled("sm_90")}


@looped(
    ("call", "fault"),
    [
        ("fused", "fma.rn.f32"),
        ("divided", "div.full.f32"),
        ("rooted", "sqrt.approx"),
        ("spilled", "stack"),
        ("masked", "no vectors"),
    ],
)
def test_each_fault_is_found_in_a_kernel_that_has_it(call: str, fault: str) -> None:
    planted = {each["call"]: faults(each) for each in compiled("sm_90", "tests.device.planted", ())}
    assert any(found.startswith(fault) for found in planted[call])
    assert planted["sound"] == set()
