"""In an instrumented copy of the tree: notes that a function was entered, and while which test.

`gradwire/__init__.py` of the copy runs this in every process, with `FOLDER`. An entry is written at once and
in one act, because ranks are killed. `now` is a number in memory that all processes share, so a process that
serves many tests notes each entry for the right one.
"""

from __future__ import annotations

import builtins
import mmap
import os

FOLDER: str = globals()["FOLDER"]

_entries = os.open(os.path.join(FOLDER, "entries"), os.O_WRONLY | os.O_APPEND)
_file = os.open(os.path.join(FOLDER, "now"), os.O_RDONLY)
_now = memoryview(mmap.mmap(_file, 4, prot=mmap.PROT_READ)).cast("i")
_seen: set[tuple[int, int]] = set()
os.close(_file)


def _entered(function: int) -> None:
    pair = (_now[0], function)
    if pair not in _seen:
        _seen.add(pair)
        os.write(_entries, b"%d %d\n" % pair)


builtins.__entered__ = _entered  # type: ignore[attr-defined]
