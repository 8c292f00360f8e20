"""Files that are written for people: whole, or not at all."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradwire.environment import write_whole


def test_a_full_disk_leaves_what_was_there_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "first")
    write_whole(path, "second")
    assert path.read_text() == "second"

    def full(self: Path, text: str, **_options: object) -> int:
        self.write_bytes(text[:2].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left on device; what was there before is as it was"):
        write_whole(path, "third")
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["report.html"]


def test_ranks_may_write_to_one_name_at_once(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write_whole, path, str(number)) for number in range(400)]:
            done.result()
    assert os.listdir(tmp_path) == ["step.json"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
