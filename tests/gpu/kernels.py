"""Kernels for devices, compiled and run: the tests that the interpreter runs elsewhere."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.by_pytest import run_tests
from tests.gpu.outcomes import Tell
from tests.support.where import WHERE

FILES = [str(path) for path in sorted(Path("tests/device").glob("test_kernels_*.py"))]


def run(tell: Tell, match: str | None = None) -> None:
    """Those of the interpreter, and of tensors that only a device has room for."""
    run_tests(tell, FILES if WHERE.type == "cpu" else [*FILES, "tests/gpu/test_large.py"], match)
