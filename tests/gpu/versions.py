"""Versions, whether gradwire and numba work here, and how fast the device copies."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from tests.gpu.outcomes import Skip, Tell, each

NEEDED = ("torch", "triton", "numpy", "numba", "pytest", "pytest-xdist", "pytest-timeout", "hypothesis")
_NUMBA = "import numba; numba.njit(lambda x: x + 1)(1); print('works')"
_GRADWIRE = "import gradwire._api.attach; print('can be imported')"


def run(tell: Tell, match: str | None = None) -> None:
    """Tell all of it."""
    each(
        tell,
        {
            "versions": versions,
            "device": device,
            "gradwire": lambda: said_by(_GRADWIRE),
            "numba": numba,
            "copy": copy_rate,
        },
    )


def versions() -> str:
    """Of what is used."""
    found = [f"Python {platform.python_version()}"]
    for name in NEEDED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def device() -> str:
    """Name, memory, and what torch was built for."""
    about = torch.cuda.get_device_properties(0)
    gib = about.total_memory / 2**30
    return (
        f"{torch.cuda.device_count()} of {about.name}, {gib:.0f} GiB, {about.multi_processor_count} "
        f"multiprocessors, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}"
    )


def numba() -> str:
    """Where it is missing, plain torch computes on the CPU; where it is broken, nothing can be relied on."""
    if find_spec("numba") is None:
        raise Skip("there is none: on the CPU plain torch computes, more slowly")
    return said_by(_NUMBA)


def said_by(program: str) -> str:
    """In a process of its own: an incompatible pair may hang."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{program!r} had not ended after 20 s") from None
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return done.stdout.strip()


def copy_rate() -> str:
    """Bytes read and written, of 1 GiB that no cache holds."""
    x = torch.empty(2**28, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        y.copy_(x)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return f"{2 * x.nbytes / sorted(times)[6] / 1e12:.2f} TB/s read and written"
