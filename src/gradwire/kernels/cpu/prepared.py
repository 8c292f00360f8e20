"""Declaration of the types with which kernels are called, so that `prepare` can compile them early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIGNATURES: dict[str, list[tuple[Any, str]]] = {}
"""Kernels that Python calls and their types in Numba's notation, by subject (the name of a file of
contracts)."""


def prepared(*signatures: str, subject: str | None = None) -> Callable[[Any], Any]:
    """Decorate a kernel that Python calls with the types of its arguments, in the order of compilation.

    Importing compiles nothing. A narrower type must stand before a wider one that would take the same call.
    `subject` is the name of the contracts' file; by default that of the kernel's own file.
    """

    def declared(kernel: Any) -> Any:
        name = subject or kernel.py_func.__module__.rsplit(".", 1)[-1]
        SIGNATURES.setdefault(name, []).extend((kernel, each) for each in signatures)
        return kernel

    return declared
