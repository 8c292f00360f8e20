"""`prepare` reaches every kernel, whoever adds one."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numba.core.dispatcher
import pytest
import torch

from gradwire.kernels import cpu, prepare, preparing
from tests.house.source import ROOT


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


def called_from_python() -> dict[str, Any]:
    """Those that a wrapper names, as `cpu.fold` or `cpu.elias_fano.split`; the others are part of their
    callers, cached with them."""
    wrappers = "".join(path.read_text() for path in (ROOT / "src" / "gradwire" / "kernels").glob("*.py"))
    named = {tuple(path.split(".")) for path in re.findall(r"\bcpu\.([\w.]+)\(", wrappers)}
    found = [functools.reduce(getattr, path, cpu) for path in named if path[-1] not in BESIDE_TRAINING]
    return {name: kernel for name, kernel in kernels().items() if any(kernel is each for each in found)}


def forgotten() -> list[str]:
    """Kernels that are not compiled after `prepare`, in a process that has called none before."""
    prepare()
    return sorted(name for name, kernel in called_from_python().items() if not kernel.signatures)


def test_kernels_are_found() -> None:
    names = {kernel.__name__ for kernel in called_from_python().values()}
    expected = {"fold", "take_chosen", "pack_bits", "encode_blocks", "sample_indices", "scatter", "take"}
    assert names >= expected | {"take_topk", "topk_indices"}


def test_prepare_leaves_nothing_to_compile() -> None:
    # A process of its own: here other tests have compiled what `prepare` may have forgotten.
    program = f"from {__name__} import forgotten; print(forgotten())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("turns", [[0, 1], [0, 1, 2, 3], [8, 9], [6, 7, 8]])
def test_turns_begin_apart_and_leave_nothing_out(monkeypatch: pytest.MonkeyPatch, turns: list[int]) -> None:
    done: list[int] = []

    def noting(number: int) -> Callable[[torch.Tensor], None]:
        return lambda _: done.append(number)

    count = 60
    monkeypatch.setattr(preparing, "_PARTS", {str(number): noting(number) for number in range(count)})
    begun = []
    for turn in turns:
        done.clear()
        monkeypatch.setattr(preparing, "_done", set())
        prepare(turn=turn)
        assert sorted(done) == list(range(count))
        begun.append(done[0])
    gaps = [(b - a) % count for a in begun for b in begun if a != b]
    assert len(set(begun)) == len(turns)
    assert min(gaps) > count / len(turns) / 2


def test_what_is_asked_for_is_prepared_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    parts = {name: lambda _, name=name: done.append(name) for name in "abc"}
    monkeypatch.setattr(preparing, "_PARTS", parts)
    monkeypatch.setattr(preparing, "_done", set())
    prepare({"c", "a", "a module that calls no kernel"})
    assert done == ["a", "c"]
    prepare({"a"})
    assert done == ["a", "c"]
    prepare()
    assert done == ["a", "c", "b"]


def test_what_users_have_as_defaults_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        preparing, "_PARTS", {"a": lambda x: seen.extend([x, x.new_empty(1), torch.empty(1)])}
    )
    monkeypatch.setattr(preparing, "_done", set())
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        prepare()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert [x.dtype for x in seen] == [torch.float32, torch.float32, torch.float64]
    assert {x.device.type for x in seen} == {"cpu"}
