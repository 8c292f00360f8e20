"""Compiles what launches would run, for a device that this machine need not have, and looks at the result.

A process of its own: `python -m tests.device.compiling sm_90 tests.device.calls` prints a line of JSON for
each kernel, and with names of calls behind it for each kernel of these.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Absent:
    """A driver for a device that is not there: Triton asks it for what to compile."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled_only(target: str) -> Iterator[list[Any]]:
    """Launches compile and run nothing; yields what they compiled."""
    found: list[Any] = []

    def launched(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **named: found.append(kernel.warmup(*arguments, grid=grid, **named))

    driver.set_active(Absent(TARGETS[target]))
    inner, JITFunction.__getitem__ = JITFunction.__getitem__, launched
    try:
        yield found
    finally:
        JITFunction.__getitem__ = inner


def facts(compiled: Any) -> dict[str, Any]:
    """What the compiled code of one kernel is made of."""
    about: dict[str, Any] = {"name": compiled.metadata.name}
    ptx = compiled.asm.get("ptx")
    about["releases"] = bool(re.search(RELEASED[ptx is None], ptx or compiled.asm["amdgcn"], re.DOTALL))
    if ptx is None:
        return about
    about["forbidden"] = sorted(set(re.findall(FORBIDDEN, ptx)))
    about["vectors"] = len(re.findall(r"(?:ld|st)\.global[\w.:]*\.v[24]", ptx))
    about["loads"] = len(re.findall(r"ld\.global", ptx))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, check=True, text=True
        ).stdout
    for name, key in (("REG", "registers"), ("STACK", "stack"), ("LOCAL", "local"), ("SHARED", "shared")):
        about[key] = int(re.findall(rf"{name}:(\d+)", usage)[0])
    return about


FORBIDDEN = r"fma\.\w+\.f\d+|div\.full\.f\d+|div\.approx[\w.]*|sqrt\.approx[\w.]*|rcp\.approx[\w.]*"
"""A fused rounding, divisions and roots that are not exact. Integers have `mad`, not `fma`."""
RELEASED = (
    r"bar\.sync\s+0;(?:(?!st\.global).)*?atom\.global\.gpu\.acq_rel",
    r"s_waitcnt vmcnt\(0\)(?:(?!_store).)*?s_barrier(?:(?!_store|s_barrier).)*?buffer_wbl2 sc1",
)
"""A program is counted after all that its threads wrote. On NVIDIA's GPUs a barrier comes before an addition
that releases; on AMD's each wave waits for its writes before the barrier. No write comes between."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def main(target: str, calls: str, *names: str) -> None:
    """Compile all kernels that `CALLS` of a module launch, or those of these names."""
    for call in import_module(calls).CALLS:
        if names and call.__name__ not in names:
            continue
        with compiled_only(target) as found:
            call()
        for compiled in found:
            print(json.dumps({"call": call.__name__, **facts(compiled)}), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = empty
        main(*sys.argv[1:])
