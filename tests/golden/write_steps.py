"""Writes the golden frames of exact steps, once: later versions read them, and none writes them again.

python -m tests.golden.write_steps
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from gradwire.codec.exact_steps import VERSION, decode_steps
from tests.golden.fuzz import STEPS_KEY, sealed, step_frames

PATH = Path(__file__).parent / "steps" / f"v{VERSION}.json"


def hexed(x: Tensor) -> str:
    """The bytes of `x`."""
    return bytes(x.untyped_storage()).hex()


def good() -> dict[str, Any]:
    """A frame of each type and layout, with old and new numbers."""
    found = {}
    for number, (data, old) in enumerate(step_frames(60)):
        new = old.clone()
        decode_steps(data, new, STEPS_KEY)
        found[f"good {number}"] = {
            "data": hexed(data), "old": hexed(old), "dtype": str(old.dtype), "new": hexed(new),
        }  # fmt: skip
    return found


def bad() -> dict[str, Any]:
    """Frames damaged in one byte: (number of the good one, byte, value, checksum made right?, the error)."""
    frames = list(step_frames(60))
    damage = {
        "magic": (1, 0, 0, True, "begins with"),
        "version": (1, 4, VERSION + 1, True, f"version {VERSION + 1}"),
        "layout": (1, 5, 3, True, "layout 3"),
        "type": (1, 6, 2, True, "of type 2"),
        "world": (1, 8, 7, True, "belongs to"),
        "module": (1, 12, 7, True, "belongs to"),
        "count": (1, 16, 61, True, "61 numbers"),
        "base": (1, 24, 7, True, "belongs to"),
        "length": (1, 32, 0, True, "arrived as"),
        "table": (1, 44, 0xFF, True, "does not decode"),
        "width": (2, 44, 17, True, "does not decode"),
        "directory": (2, 56, 99, True, "does not decode"),
        "runs": (1, -9, 0xEE, True, "does not decode"),
        "checksum": (1, -1, 0xEE, False, "checksum"),
        "body": (1, 60, 0xEE, False, "checksum"),
    }
    found = {}
    for name, (number, at, value, is_sealed, words) in damage.items():
        data, old = frames[number][0].clone(), frames[number][1]
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
