"""Classes of frameworks that need not be installed: modules that inherit from them can always be imported."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def base(name: str, *modules: str) -> Any:
    """The class `name` from the first of `modules` that is installed.

    If none is installed, a class whose instances cannot be made: that raises `ImportError`, which says what
    to install.

    >>> base("Callback", "no_such_framework.callbacks")()
    Traceback (most recent call last):
    ...
    ImportError: this needs no_such_framework: pip install no_such_framework
    """
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or " "):
                raise  # installed, but broken
    package = modules[0].split(".")[0]

    class Absent:
        def __new__(cls, *_: Any, **__: Any) -> Any:
            raise ImportError(f"this needs {package}: pip install {package}")

    return Absent
