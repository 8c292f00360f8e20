"""Writes the golden frames of exact steps, once: later versions read them, and none writes them again.

python -m tests.golden.write_steps
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from gradwire.codec.exact_steps import VERSION, Layout, decode_steps
from tests.golden.fuzz import STEPS_KEY, sealed, step_frames

PATH = Path(__file__).parent / "steps" / f"v{VERSION}.json"


def hexed(x: Tensor) -> str:
    """The bytes of `x`."""
    return bytes(x.untyped_storage()).hex()


NEW: list[Layout] = ["states"]
"""Layouts that are new in this version. Of few numbers or large changes its frames would be raw."""


def good() -> dict[str, Any]:
    """A frame of each type and new layout, with old and new numbers."""
    found = {}
    for number, (data, old) in enumerate(step_frames(600, NEW)):
        new = old.clone()
        decode_steps(data, new, STEPS_KEY)
        found[f"good {number}"] = {
            "data": hexed(data), "old": hexed(old), "dtype": str(old.dtype), "new": hexed(new),
        }  # fmt: skip
    return found


def bad() -> dict[str, Any]:
    """Frames damaged in one byte: (byte, value, checksum made right?, the error)."""
    damage = {
        "version": (4, VERSION + 1, True, f"version {VERSION + 1}"),
        "version of other layouts": (4, 1, True, "version 1 holds .* in layout 3"),
        "layout": (5, 1, True, "version 2 holds .* in layout 1"),
        "no layout": (5, 4, True, "in layout 4"),
        "table": (44, 0xFF, True, "does not decode"),
        "length of a table": (44, 2, True, "does not decode"),
        "state": (56, 0xEE, True, "does not decode"),
        "skipped": (60, 0xEE, True, "does not decode"),
        "first word": (63, 0x80, True, "does not decode"),
        "weight": (64, 0, True, "does not decode"),
        "stream": (-9, 0xEE, True, "does not decode"),
        "checksum": (-1, 0xEE, False, "checksum"),
    }
    frame, old = next(step_frames(200, NEW))
    found = {}
    for name, (at, value, is_sealed, words) in damage.items():
        data = frame.clone()
        data[at] = value if int(data[at]) != value else value ^ 1
        data = sealed(data) if is_sealed else data
        found[name] = {"data": hexed(data), "old": hexed(old), "dtype": str(old.dtype), "error": words}
    return found


def main() -> None:
    """Write what is not there."""
    PATH.parent.mkdir(exist_ok=True)
    known = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    PATH.write_text(json.dumps({**good(), **bad(), **known}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
