"""Contracts and their twins by name, as tests compare them: `plain.compensate`, `cpu.compensate`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from inspect import isfunction
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

KERNELS = "gradwire.kernels"
HAS_NUMBA = find_spec("numba") is not None
CPUS_ALONE = ("frames", "huffman")
"""Subjects without contracts, which cannot be imported without Numba."""


def files(package: str = KERNELS) -> dict[str, ModuleType]:
    """The modules of a package by name, imported; not the packages in it."""
    found = [each.name for each in iter_modules(import_module(package).__path__) if not each.ispkg]
    return {name: import_module(f"{package}.{name}") for name in found if HAS_NUMBA or name not in CPUS_ALONE}


CONTRACTS: dict[str, Any] = {
    name: value
    for module in files().values()
    for name, value in vars(module).items()
    if isfunction(value) and hasattr(value, "plain") and value.__module__ == module.__name__
}
"""All contracts, by name."""


class Twins:
    """The functions of `cpu/` or `device/` by the names of their contracts."""

    def __init__(self, folder: str) -> None:
        self._folder = f"{KERNELS}.{folder}"

    def __getattr__(self, name: str) -> Any:
        home = f"{self._folder}.{CONTRACTS[name].__module__.rpartition('.')[2]}"
        if find_spec(home) is None:
            raise AttributeError(f"{name} has no twin: there is no {home}")
        return getattr(import_module(home), name)


class _Plain:
    """The contracts in plain torch."""

    def __getattr__(self, name: str) -> Any:
        return CONTRACTS[name].plain


plain = _Plain()
cpu: Any = Twins("cpu") if HAS_NUMBA else plain
"""Without Numba nothing is on the CPU but plain torch."""
