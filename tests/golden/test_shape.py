"""What a restructuring must leave alone: announced rounds, keys of reports, options of commands, checkpoints.

`python -m tests.golden.test_shape` writes the files. A line of them changes together with the behaviour, in a
commit that says why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from torch import Tensor

from gradwire._api.report import Report
from gradwire.checkpoint import state
from gradwire.cli.main import app
from gradwire.comm import Comm, run_ranks
from tests.golden import rounds
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE
from tests.support.rig import Rig, gradients

HERE = Path(__file__).parent / "shape"


def lines(name: str) -> list[str]:
    """Lines that say what a recipe announces."""
    found = [EVERY_RECIPE[name]]
    for step, told in enumerate(announced := rounds.announced(name)):
        same = step > 0 and told == announced[step - 1]
        found.append(f"  step {step}: {'as before' if same else told}")
    return found


def surface() -> dict[str, Any]:
    """Keys of the report, options of the commands, and what a checkpoint holds by recipe."""
    return {
        "report": sorted([*Report.__dataclass_fields__, "ratio"]),
        "commands": _options(typer.main.get_command(app), "gradwire"),
        "checkpoints": {text: _checkpoint(text) for text in dict.fromkeys(EVERY_RECIPE.values())},
    }


def _options(command: Any, path: str) -> dict[str, list[str]]:
    found = {path: sorted(name for parameter in command.params for name in parameter.opts)}
    for name in getattr(command, "commands", ()):
        found |= _options(command.commands[name], f"{path} {name}")
    return found


def _checkpoint(text: str) -> list[str]:
    """One step on two ranks, then the state's keys with the types of what they hold."""

    def rank(comm: Comm) -> list[str]:
        rig = Rig(comm, text)
        rig.step(gradients(comm.rank, 0))
        saved = state.save(rig.reducer)
        return sorted(f"{key}: {_kind(value)}" for key, value in saved.items())

    return run_ranks(2, rank)[0]


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_kind(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


@looped("name", rounds.NAMES)
def test_rounds_are_announced_as_they_were(name: str) -> None:
    written = (HERE / "rounds.txt").read_text(encoding="utf-8")
    assert "\n".join(["", *lines(name), ""]) in f"\n{written}"


def test_reports_commands_and_checkpoints_have_the_keys_they_had() -> None:
    assert surface() == json.loads((HERE / "surface.json").read_text(encoding="utf-8"))


def main() -> None:
    """Write both files anew."""
    HERE.mkdir(exist_ok=True)
    told = [line for name in rounds.NAMES for line in lines(name)]
    (HERE / "rounds.txt").write_text("\n".join(told) + "\n", encoding="utf-8")
    (HERE / "surface.json").write_text(json.dumps(surface(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
