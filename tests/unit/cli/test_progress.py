"""What a terminal shows while a prediction is made."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from gradwire.cli.progress import ROWS, waiting


def test_a_terminal_shows_rows_as_they_come_and_the_share() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=60)
    with waiting(console) as told:
        for number in range(ROWS + 3):
            told(f"row {number}: [x]", number / 100)
            assert f"row {number}: [x]" in console.file.getvalue()  # type: ignore[attr-defined]
        assert f"{ROWS + 2}%" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_file_gets_nothing() -> None:
    console = Console(file=StringIO(), force_terminal=False)
    with waiting(console) as told:
        told("row", 0.5)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
