"""Files that are written for people: whole, or not at all; and the oldest torch."""

from __future__ import annotations

import os
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gradwire
from gradwire.environment import OLDEST_TORCH, require_torch, write_whole
from tests.support.ranks import ROOT


@pytest.mark.parametrize("found", ["2.9.1", "2.10.0+cu128", "1.13.1"])
def test_an_older_torch_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("gradwire.environment.version", lambda _package: found)
    monkeypatch.delitem(vars(gradwire), "attach", raising=False)  # as on first use
    with pytest.raises(ImportError, match=rf"needs torch 2\.11 or later, and {found.split('+')[0]}"):
        _ = gradwire.attach


@pytest.mark.parametrize("found", ["2.11.0", "2.15.0+cu132", "2.16.0.dev20261101", "3.0a0+git1234"])
def test_a_newer_torch_is_not(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("gradwire.environment.version", lambda _package: found)
    require_torch()


def test_the_oldest_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}" in project["dependencies"]


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
