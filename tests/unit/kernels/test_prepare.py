"""`prepare` reaches every kernel, new ones included."""

from __future__ import annotations

import importlib.util
import pkgutil
import subprocess
import sys
from types import FunctionType
from typing import Any

import numba.core.dispatcher
import pytest
import torch

from gradwire.kernels import compiler, cpu, frames, huffman
from gradwire.kernels.compiler import prepare
from gradwire.kernels.cpu.prepared import SIGNATURES
from tests.support.source import ROOT


def kernels() -> dict[str, Any]:
    """Everything jitted in any module of the package, by name."""
    found = {}
    for module in pkgutil.walk_packages(cpu.__path__, cpu.__name__ + "."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, numba.core.dispatcher.Dispatcher):
                found[f"{value.py_func.__module__}.{value.__name__}"] = value
    return found


BESIDE_TRAINING = {"quarter", "encode_stream", "decode_streams"}
"""Of `encode_symbols` and `decode_symbols`, for users: training codes whole chunks in one kernel."""


def named(function: FunctionType) -> set[Any]:
    """The kernels whose names stand in the code of `function`, or of what is defined within it."""
    found, left = set(), [function.__code__]
    while left:
        code = left.pop()
        left += [each for each in code.co_consts if hasattr(each, "co_names")]
        for name in code.co_names:
            for value in (
                function.__globals__.get(name),
                getattr(function.__globals__.get("cpu"), name, None),
            ):
                if isinstance(value, numba.core.dispatcher.Dispatcher):
                    found.add(value)
    return found


def called_from_python() -> dict[str, Any]:
    """Those that functions on tensors name, as `_compensate` or `cpu.checksum`; the others are part of their
    callers, cached with them."""
    files = pkgutil.iter_modules(cpu.__path__, cpu.__name__ + ".")
    modules = [importlib.import_module(each.name) for each in files]
    functions = [
        value
        for module in (*modules, frames, huffman)
        for owner in (module, *(each for each in vars(module).values() if isinstance(each, type)))
        for value in (getattr(each, "func", each) for each in vars(owner).values())
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    ]
    found = {kernel for function in functions for kernel in named(function)}
    return {
        name: kernel
        for name, kernel in kernels().items()
        if kernel in found and kernel.__name__ not in BESIDE_TRAINING
    }


def forgotten() -> list[str]:
    """Kernels that are not compiled after `prepare`, in a process that has called none before."""
    prepare(compiler.every())
    return sorted(name for name, kernel in called_from_python().items() if not kernel.signatures)


def test_kernels_are_found() -> None:
    names = {kernel.__name__ for kernel in called_from_python().values()}
    expected = {
        "_compensate",
        "_take_chosen",
        "set_bits",
        "_encode_blocks",
        "_sample_indices",
        "_scatter",
        "_take",
    }
    assert names >= expected | {
        "_topk_indices",
        "checksum",
        "fill_pairs",
        "encode_chunks",
        "split",
    }


def test_what_python_calls_says_with_which_types() -> None:
    declared = {id(kernel) for each in SIGNATURES.values() for kernel, _types in each}
    assert [name for name, kernel in called_from_python().items() if id(kernel) not in declared] == []


def test_importing_compiles_nothing() -> None:
    program = f"from {__name__} import kernels; print([n for n, k in kernels().items() if k.signatures])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.rest
def test_prepare_leaves_nothing_to_compile() -> None:
    # A process of its own: here other tests have compiled what `prepare` may have forgotten.
    program = f"from {__name__} import forgotten; print(forgotten())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


class Noting:
    """A kernel that notes when it is compiled."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self.done = name, done

    def compile(self, types: str) -> None:
        """Compile nothing."""
        assert types == "(int64,)"
        self.done.append(self.name)


def another() -> Any:
    """The module `compiler` once more, as in another process: it has prepared nothing."""
    found = importlib.util.find_spec(compiler.__name__)
    assert found is not None
    assert found.loader is not None
    fresh = importlib.util.module_from_spec(found)
    found.loader.exec_module(fresh)
    return fresh


def noting(names: list[str]) -> tuple[Any, list[str]]:
    """Another process, in which there is one kernel for each of these subjects; and what it has compiled."""
    fresh, done = another(), list[str]()
    fresh.SIGNATURES = {name: [(Noting(name, done), "int64")] for name in names}
    fresh.import_module = lambda _name: None
    return fresh, done


@pytest.mark.parametrize("turns", [[0, 1], [0, 1, 2, 3], [8, 9], [6, 7, 8]])
def test_turns_begin_apart_and_leave_nothing_out(turns: list[int]) -> None:
    count = 60
    names = [f"{number:02}" for number in range(count)]
    begun = []
    for turn in turns:
        fresh, done = noting(names)
        fresh.prepare(names, turn=turn)
        assert sorted(done) == names
        begun.append(int(done[0]))
    gaps = [(b - a) % count for a in begun for b in begun if a != b]
    assert len(set(begun)) == len(turns)
    assert min(gaps) > count / len(turns) / 2


def test_what_is_asked_for_is_prepared_once_in_a_process() -> None:
    fresh, done = noting(["a", "b", "c"])
    fresh.prepare({"c", "a", "one without kernels that Python calls"})
    assert done == ["a", "c"]
    fresh.prepare({"a", "b"})
    assert done == ["a", "c", "b"]


def test_what_users_have_as_defaults_changes_nothing() -> None:
    before, fresh = {name: kernel.signatures for name, kernel in prepared().items()}, another()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        fresh.prepare(fresh.every())
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert {name: kernel.signatures for name, kernel in prepared().items()} == before


def prepared() -> dict[str, Any]:
    """What `prepare` compiles, compiled."""
    prepare(compiler.every())
    return called_from_python()
