"""An example is read in one go. `benchmarks.house` reports other lengths, which are no goal."""

from __future__ import annotations

from tests.support.source import ROOT

LONGEST_EXAMPLE = 59


def test_examples() -> None:
    files = [*(ROOT / "examples").glob("*.py")]
    assert files
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > LONGEST_EXAMPLE} == {}
