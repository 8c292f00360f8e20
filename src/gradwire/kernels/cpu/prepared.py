"""With which types kernels are called: declared beside each kernel, compiled when `prepare` asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIGNATURES: dict[str, list[tuple[Any, str]]] = {}
"""By subject, the name of a file of contracts: kernels that Python calls, and types in Numba's notation."""


def prepared(*signatures: str, subject: str | None = None) -> Callable[[Any], Any]:
    """A decorator for a kernel that Python calls: its arguments' types, in the order of their compilation.

    Importing compiles nothing. A narrower type stands before a wider one that would take the same call.
    `subject` is the contracts' file; by default it has the name of the kernel's own.
    """

    def declared(kernel: Any) -> Any:
        name = subject or kernel.py_func.__module__.rsplit(".", 1)[-1]
        SIGNATURES.setdefault(name, []).extend((kernel, each) for each in signatures)
        return kernel

    return declared
