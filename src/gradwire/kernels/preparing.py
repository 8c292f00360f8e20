"""Kernels compiled, or loaded from the cache, before a training step waits for them."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

from gradwire.kernels import cpu
from gradwire.kernels.cpu.prepared import SIGNATURES


def prepare(subjects: Collection[str] | None = None, turn: int = 0) -> None:
    """Compile (or load from the cache) kernels now: it takes seconds, and holds the interpreter lock.

    `subjects` are names of files of contracts, such as "topk": their kernels are prepared, once in a process;
    by default all are. Processes of one machine that do this at the same time begin at different subjects, if
    there are enough, when each has a `turn` of its own, 0, 1, 2 and so on. What one of them has compiled, the
    others find in the cache.

    >>> prepare({"topk"})
    """
    for name in _files() if subjects is None else subjects:
        _load(name)
    names = [name for name in sorted(SIGNATURES) if subjects is None or name in subjects]
    # Multiples of the golden ratio lie far apart, whichever turns are on this machine.
    first = int(turn * 0.618034 % 1.0 * len(names))
    for name in names[first:] + names[:first]:
        if name not in _done:
            for kernel, types in SIGNATURES[name]:
                kernel.compile(f"({types},)")
            _done.add(name)


_done: set[str] = set()


def _files() -> list[str]:
    return [each.name for each in iter_modules(cpu.__path__)]


def _load(subject: str) -> None:
    """Import what declares the kernels of a subject. Some have their caller's name: `frames`."""
    for home in (f"gradwire.kernels.{subject}", f"{cpu.__name__}.{subject}"):
        if subject.isidentifier() and find_spec(home) is not None:
            import_module(home)
