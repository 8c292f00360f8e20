"""Tables and pictures of the documents say what the files of the last measured runs say."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from benchmarks import tables

DEMO, SWEEP = tables.load()
WRITTEN = [str(path.relative_to(tables.ROOT)) for path in tables.pages(DEMO, SWEEP)]


@pytest.mark.parametrize("page", WRITTEN)
def test_the_page_has_the_numbers_of_the_files(page: str) -> None:
    path = tables.ROOT / page
    wanted = tables.pages(DEMO, SWEEP)[path]
    assert path.read_text(encoding="utf-8") == wanted, "run python -m benchmarks.tables"


def test_another_number_in_the_file_is_another_text() -> None:
    other = copy.deepcopy(DEMO)
    for row in other["rows"]:
        row["step_s"] *= 2
        row["scaling"] /= 2
    for spans in other["timelines"].values():
        spans[0]["stop_s"] *= 2
    now, then = tables.pages(DEMO, SWEEP), tables.pages(other, SWEEP)
    assert [path.name for path in now if now[path] == then[path]] == []


def test_what_was_missed_stands_above_the_table() -> None:
    checks = [{"passed": False, "worse": "worse by 0.14"}, {"passed": True, "worse": ""}]
    text = tables.gains({**DEMO, "checks": checks})
    assert (
        0 < text.index("**Missed in this run: worse by 0.14.** 1 of 2 claims") < text.index("| plain DDP |")
    )
    assert "Missed" not in tables.gains({**DEMO, "checks": checks[1:]})


def test_a_line_of_the_sweep_is_a_row() -> None:
    name = tables.SETTINGS[2].name
    line = {"setting": name, "chosen": "int4(block=128)", "step_s": {"bound": 0.1, "ddp": 0.4, "auto": 0.2}}
    assert "| `chargpt` | 2 | 100mbit, 10ms | 25.0 % | 50.0 % (`int4`) |" in tables.measured(DEMO, [line])
    failed = {**line, "step_s": {"bound": 0.1, "ddp": 0.4, "auto": None}}
    assert "chargpt" not in tables.measured(DEMO, [failed])


def test_what_is_kept_of_a_run_makes_the_same_tables(tmp_path: Path) -> None:
    # Twice: the second time nothing is left to round or to leave out.
    kept = tables.small(json.loads(json.dumps(DEMO)))
    assert kept == DEMO
    full = copy.deepcopy(DEMO)
    full["rows"][0]["step_s_all"] = [0.123456789]
    full["seconds"] += 1e-9
    assert tables.small(full) == DEMO


def test_a_page_without_the_place_is_refused() -> None:
    with pytest.raises(ValueError, match="no place"):
        tables.placed("# A page\n", "gains", "text")
