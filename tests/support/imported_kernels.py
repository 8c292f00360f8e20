"""Which kernels' contracts a recipe imports when it is built, and which only in its steps: JSON.

A process for each recipe that is named, forked from one that has imported none.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

import torch

from gradwire.comm import run_ranks
from gradwire.kernels import compiler
from gradwire.recipes import recipe
from tests.support.two_steps import train


def found(text: str) -> dict[str, list[str]]:
    """In this process."""
    exchange = recipe(text).build().exchange
    built = compiler.imported()
    # Contracts are enough, and need no Numba. What codes GComp's frames has none.
    for subject in compiler.every() - {"frames", "huffman"}:
        sys.modules[f"gradwire.kernels.cpu.{subject}"] = None  # type: ignore[assignment]
    run_ranks(2, partial(train, exchange))
    return {"built": sorted(built), "in steps": sorted(compiler.imported() - built)}


def apart(text: str) -> dict[str, list[str]]:
    """In a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w") as out:
            json.dump(found(text), out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    result = json.loads(told)
    assert isinstance(result, dict)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({text: apart(text) for text in sys.argv[1:]}, sys.stdout)
