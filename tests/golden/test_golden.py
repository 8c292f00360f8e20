"""Frames of every version are read as they were when they were written, and damaged ones still refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.codec.gcomp import CodeTable, Key, unframe
from gradwire.errors import WireError
from tests.golden import slow
from tests.support.looped import looped

FILES = sorted((Path(__file__).parent / "frames").glob("*.json"))
FRAMES = {
    f"{path.stem}/{name}": entry
    for path in FILES
    for name, entry in json.loads(path.read_text(encoding="utf-8")).items()
}


def received(entry: dict[str, Any]) -> torch.Tensor:
    """What the fast decoder makes of it."""
    out = torch.empty(entry["numel"], dtype=getattr(torch, entry["dtype"].removeprefix("torch.")))
    table = CodeTable(bytes.fromhex(entry["table"]))
    dropped = entry["dropped"]
    if isinstance(dropped, list):
        dropped = torch.tensor(dropped, dtype=torch.uint8)
    data = torch.tensor(list(bytes.fromhex(entry["data"])), dtype=torch.uint8)
    unframe(data, out, dropped, {table.id: table}, Key(**entry["key"]))
    return out


def slowly_received(entry: dict[str, Any]) -> bytes:
    table = CodeTable(bytes.fromhex(entry["table"]))
    lengths = {table.id: table.lengths.tolist()}
    data, numel, dtype = bytes.fromhex(entry["data"]), entry["numel"], entry["dtype"]
    numbers = slow.unframe(data, numel, dtype, entry["dropped"], lengths, Key(**entry["key"]))
    size = 4 if dtype == "torch.float32" else 2
    return b"".join(number.to_bytes(size, "little") for number in numbers)


def test_there_are_frames() -> None:
    assert len([name for name in FRAMES if "-good/" in name]) >= 7
    assert len([name for name in FRAMES if "-bad/" in name]) >= 15


@pytest.mark.parametrize("name", [name for name in FRAMES if "-good/" in name])
def test_good_frames(name: str) -> None:
    entry = FRAMES[name]
    assert received(entry).view(torch.uint8).numpy().tobytes() == bytes.fromhex(entry["expected"])
    assert slowly_received(entry) == bytes.fromhex(entry["expected"])


@looped("name", [name for name in FRAMES if "-bad/" in name])
def test_bad_frames(name: str) -> None:
    entry = FRAMES[name]
    with pytest.raises(WireError, match=entry["expected"]):
        received(entry)
    with pytest.raises(WireError):
        slowly_received(entry)
