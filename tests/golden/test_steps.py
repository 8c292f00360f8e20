"""Frames of exact steps of every version are read as when they were written, and damaged ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.codec.exact_steps import decode_steps
from gradwire.errors import WireError
from tests.golden.fuzz import STEPS_KEY
from tests.support.looped import looped

FRAMES = {
    f"{path.stem}/{name}": entry
    for path in sorted((Path(__file__).parent / "steps").glob("*.json"))
    for name, entry in json.loads(path.read_text(encoding="utf-8")).items()
}


def tensor(text: str, dtype: str) -> Tensor:
    """The numbers of these bytes."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8).view(getattr(torch, dtype[6:]))


@looped("name", [name for name, entry in FRAMES.items() if "new" in entry])
def test_good_frames(name: str) -> None:
    entry: dict[str, Any] = FRAMES[name]
    held = tensor(entry["old"], entry["dtype"])
    decode_steps(tensor(entry["data"], "torch.uint8"), held, STEPS_KEY)
    assert held.view(torch.uint8).numpy().tobytes() == bytes.fromhex(entry["new"])


@looped("name", [name for name, entry in FRAMES.items() if "error" in entry])
def test_bad_frames(name: str) -> None:
    entry: dict[str, Any] = FRAMES[name]
    with pytest.raises(WireError, match=entry["error"]):
        decode_steps(tensor(entry["data"], "torch.uint8"), tensor(entry["old"], entry["dtype"]), STEPS_KEY)


def test_there_are_frames_of_each_type_and_layout() -> None:
    kinds = {(entry["data"][10:12], entry["dtype"]) for entry in FRAMES.values() if "new" in entry}
    types = ("torch.bfloat16", "torch.float16")
    assert kinds >= {(f"{layout:02x}", dtype) for layout in range(4) for dtype in types}
