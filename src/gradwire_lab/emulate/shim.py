"""Runs a Python program with the delaying process group in the place of gloo.

    python -m gradwire_lab.emulate.shim train.py …    (also -m module … and -c code …)

`init_process_group` and `new_group` take the delaying backend wherever gloo was asked for, or would have been
taken by default for the CPU. `torch.distributed.get_backend()` tells its true name.
"""

import functools
import inspect
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradwire_lab.emulate.delayed_group import NAME, register


def resolve(backend: Any) -> Any:
    """The backend string with every gloo in it replaced.

    >>> resolve("cpu:gloo,cuda:nccl")
    'cpu:gradwire_delayed,cuda:nccl'
    """
    if not isinstance(backend, str):
        return backend
    parts = (part.rpartition(":") for part in backend.split(","))
    return ",".join(head + sep + (NAME if name.lower() == "gloo" else name) for head, sep, name in parts)


def _resolving(function: Callable[..., Any], default: str | None) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        asked = bound.arguments.get("backend")
        bound.arguments["backend"] = resolve(default if asked is None else asked)
        return function(*bound.args, **bound.kwargs)

    return wrapper


def take_the_place_of_gloo() -> None:
    """Make `init_process_group` and `new_group` of this process create delayed groups."""
    register()
    for name, default in (("init_process_group", "gloo"), ("new_group", None)):
        wrapped = _resolving(getattr(distributed_c10d, name), default)
        setattr(distributed_c10d, name, wrapped)
        setattr(dist, name, wrapped)


def _end_with(parent: int) -> None:
    """End with the launcher: looks twice a second, because without namespaces the kernel does not do it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    take_the_place_of_gloo()
    _run(sys.argv[1:])
