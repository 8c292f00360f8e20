"""NVIDIA's compute-sanitizer over a few kernel tests: accesses out of bounds, and races in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests.gpu.outcomes import Outcome, Tell
from tests.support.where import WHERE

TOOLS = ("memcheck", "racecheck")
FOUND = 86
"""The exit code that we ask for where the tool has found something."""
FILES = tuple(f"tests/device/test_kernels_{name}.py" for name in ("chunks", "compensate", "stochastic"))
MATCH = "tie_beyond or idle_pieces or rescaling or poison or both_halves"
LIMIT_S = 42.0


def run(tell: Tell, match: str | None = None) -> None:
    """All tools at once: each spends most of its time on starting up."""
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is None or WHERE.type != "cuda":
        for tool in TOOLS:
            tell(
                Outcome(
                    tool, "skipped", "there is no compute-sanitizer on the PATH, nor in /usr/local/cuda/bin"
                )
            )
        return
    running = {tool: _started(sanitizer, tool, match or MATCH) for tool in TOOLS}
    for tool, process in running.items():
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            tell(Outcome(tool, "skipped", f"had not ended after {LIMIT_S:.0f} s"))
            continue
        print(said)
        tell(verdict(tool, process.returncode, said))


def _started(sanitizer: str, tool: str, match: str) -> subprocess.Popen[str]:
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]
    return subprocess.Popen(
        [*command, *FILES, "-k", match], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def verdict(tool: str, code: int, said: str) -> Outcome:
    """A device that the tool cannot look at is no fault of the kernels."""
    lines = [line for line in said.splitlines() if line.startswith("=========")]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), "")
    if "Device not supported" in said or (not lines and code != 0):
        return Outcome(tool, "skipped", "compute-sanitizer cannot look at this device")
    if code == 0:
        return Outcome(tool, "passed", summary.strip("= "))
    return Outcome(tool, "failed", f"ended with {code}; {summary.strip('= ') or lines[:3]}")
