"""Starts `python -m MODULE` again and again, each in a fork of a process that has loaded torch.

A fault takes three or four processes. Each of them would load torch, Numba and pytest, which takes longer
than its tests. Nothing of gradwire is loaded here, nor of the tests: a process takes these from its copy.

One line of JSON asks for a process. The answers are its number, and how it ended once it has ended.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from importlib import import_module
from typing import Any

LOADED = ("numba", "pytest", "torch.distributed")


def _become(asked: dict[str, Any]) -> None:
    """As an interpreter does that is started with these words, in this folder and with these variables."""
    os.setsid()
    print(os.getpid(), flush=True)
    for file, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(name, flags, 0o644)
        os.dup2(opened, file)
        os.close(opened)
    os.dup2(1, 2)
    os.chdir(asked["root"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None
    import_module("numba.core.config").reload_config()
    sys.path[:0] = [asked["root"], *os.environ["PYTHONPATH"].split(":")]
    sys.argv = ["", *asked["words"]]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    for name in LOADED:
        import_module(name)
    for line in sys.stdin:
        if not (number := os.fork()):
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)
