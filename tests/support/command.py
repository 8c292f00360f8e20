"""Running the command line as a user does, and looking for what it leaves behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

COMMAND = [sys.executable, "-c", "from gradwire.cli.main import app; app()"]


def gradwire(*words: str, within_s: float = 100) -> "subprocess.CompletedProcess[str]":
    """The finished command, with what it printed."""
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=within_s, check=False)


def processes(marker: str) -> list[int]:
    """Processes, seen from outside of any sandbox, with a word of their command line equal to `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended meanwhile
            if marker.encode() in words:
                found.append(int(entry.name))
    return found


def namespaces(kind: str) -> set[str]:
    """The namespaces of a kind (`net`, `pid`) that any process lives in."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.add(os.readlink(entry / "ns" / kind))
            except OSError:
                continue
    return found


def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether the condition came true in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True
