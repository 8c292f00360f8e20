"""Writes the golden frames of a version, once: later versions read them, and none writes them again.

    python -m tests.golden.write

Existing frames are left alone: one that is read differently than when it was written is a broken promise.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.codec.gcomp import frame, unframe
from gradwire.codec.gcomp.frame import VERSION
from tests.golden.fuzz import KEY, Case, cases, outcome, sealed

HERE = Path(__file__).parent / "frames"
KINDS = ("lossless", "cut", "levels", "thresholds", "raw", "bfloat16", "float16")
SHORT_KINDS = ("bfloat16 thresholds", "float16 thresholds", "bfloat16 levels", "float16 cut")
"""Defined later than the rest of version 1, whose decoders refused them."""


def entry(case: Case, data: Tensor, expected: str) -> dict[str, Any]:
    """All that a receiver needs; `expected` are the numbers' bytes, or words from the error."""
    dropped = case.dropped.tolist() if isinstance(case.dropped, Tensor) else case.dropped
    return {
        "data": data.numpy().tobytes().hex(),
        "dtype": str(case.out.dtype),
        "numel": case.out.numel(),
        "dropped": dropped,
        "table": case.table.packed.hex(),
        "key": asdict(KEY),
        "expected": expected,
    }


def good(kinds: tuple[str, ...]) -> dict[str, Any]:
    """A frame of each of these kinds."""
    found = {}
    for name, case in zip((*KINDS, *SHORT_KINDS), cases(60), strict=True):
        if name not in kinds:
            continue
        assert outcome(case.data, case) == "decoded"
        found[name] = entry(case, case.data, case.out.view(torch.uint8).numpy().tobytes().hex())
    return found


def escaping() -> Case:
    """A frame of float16 with one exponent that its table has no code for."""
    case = dict(zip((*KINDS, *SHORT_KINDS), cases(60), strict=True))["float16"]
    values = case.out.clone()
    unframe(case.data, values, case.dropped, {case.table.id: case.table}, KEY)
    values[7] = 60_000.0
    return case._replace(data=frame(values, 0, case.table, KEY, explicit=False, flush=False))


def bad() -> dict[str, Any]:
    """Frames damaged in one place each: (byte, new value, checksum made right?, what the error says)."""
    damage = {
        "magic": (0, 0x00, True, "begins with"),
        "version": (4, VERSION + 1, True, f"version {VERSION + 1}"),
        "type": (5, 9, True, "no type"),
        "flags": (6, 0x80, True, "flags"),
        "drop": (7, 3, True, "dropped"),
        "step": (8, 0xEE, True, "belongs to"),
        "hop": (20, 0xEE, True, "belongs to"),
        "table": (28, 0xEE, True, "not among those agreed"),
        "numel": (39, 0x80, True, "expected were"),
        "length": (47, 0x80, True, "arrived as"),
        "checksum": (-1, 0xEE, False, "checksum"),
        "body": (60, 0xEE, False, "checksum"),
        "directory": (-24, 0xEE, True, "does not add up"),
        "kind": (-10, 2, True, "does not add up"),
        "streams": (48, 0xEE, True, "does not decode"),
        "padding": (-25, 0xEE, True, "does not decode"),
    }
    found = {}
    case = next(iter(cases(60)))
    for name, (at, value, is_sealed, words) in damage.items():
        data = case.data.clone()
        data[at] = value if int(data[at]) != value else value ^ 1
        found[name] = entry(case, sealed(data) if is_sealed else data, words)
    filled = dict(zip((*KINDS, *SHORT_KINDS), cases(61), strict=True))["raw"]
    escaped = escaping()
    # Escapes follow the four streams, whose sizes begin the only row of the directory.
    streams = sum(escaped.data[-24:-16].view(torch.int16).tolist())
    for name, (of, at, value) in {
        "raw filling": (filled, -25, 0x01),
        "float16 exponent": (escaped, 48 + 8 * streams, 32),
    }.items():
        data = of.data.clone()
        data[at] = value
        found[name] = entry(of, sealed(data), "does not decode")
    short = case.data[:-8].clone()
    found["short"] = entry(case, short, "arrived as")
    found["nothing"] = entry(case, short[:0], "less than a frame's header")
    return found


def main() -> None:
    """Write what is not there."""
    HERE.mkdir(exist_ok=True)
    for kind, content in (("good", good(KINDS)), ("short-good", good(SHORT_KINDS)), ("bad", bad())):
        path = HERE / f"v{VERSION}-{kind}.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        new = {name: each for name, each in content.items() if name not in known}
        path.write_text(json.dumps(known | new, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
