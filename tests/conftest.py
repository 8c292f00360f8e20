"""What all tests share: one thread per rank, and the seed of the sampled laws in the header."""

from __future__ import annotations

import os
import random
import signal
from importlib.util import find_spec

import torch

from gradwire.kernels import compiler

# Set before workers of pytest-xdist start, so that all of them sample the same rows.
os.environ.setdefault("GRADWIRE_LAWS_SEED", str(random.SystemRandom().randrange(10**6)))

# A shell makes what runs in the background deaf to Ctrl-C, and children inherit that; tests send it to them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks are threads: a pool of more threads under each of them only makes them wait for each other.
torch.set_num_threads(1)


def pytest_report_header() -> str:
    """How to run the same sample of the laws again."""
    if os.environ.get("GRADWIRE_LAWS") == "full":
        return "laws: in full"
    seed = os.environ["GRADWIRE_LAWS_SEED"]
    return f"laws: pairwise sample, repeat it with GRADWIRE_LAWS_SEED={seed} (GRADWIRE_LAWS=full for all)"


def pytest_sessionstart() -> None:
    """Kernels that are not compiled yet are compiled by all workers, and each by one of them."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and find_spec("numba") is not None:
        compiler.prepare(compiler.every(), turn=int(worker.removeprefix("gw")))
