"""Results that could not be written are refused before the work."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gradwire.cli.main import app
from gradwire.cli.prerequisites import check_folder


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    check_folder(None, tmp_path / "out.json")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        check_folder(tmp_path / "nowhere" / "out.json")


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "--json"],
        ["bench", "--report"],
        ["report", "bench.json", "--out"],
        ["demo", "--report"],
        ["demo", "--json"],
        ["net", "run", "--json"],
    ],
)
def test_every_command_looks_first(command: list[str], tmp_path: Path) -> None:
    words = [*command, str(tmp_path / "nowhere" / "x"), *(["--", "true"] if command[0] == "net" else [])]
    found = CliRunner().invoke(app, words, standalone_mode=False)
    assert isinstance(found.exception, typer.BadParameter)
    assert "nowhere does not exist" in str(found.exception)
