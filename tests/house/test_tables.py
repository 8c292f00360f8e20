"""Tables and pictures of the documents say what the files of the last measured runs say."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from benchmarks import tables

from tests.support.source import ROOT

DEMO, SWEEP = tables.load()


def test_pages_and_pictures_have_the_numbers_of_the_files() -> None:
    written = tables.pages(DEMO, SWEEP)
    old = [path for path, text in written.items() if path.read_text(encoding="utf-8") != text]
    assert not old, "run python -m benchmarks.tables"


def test_another_number_in_the_file_is_another_text() -> None:
    other = copy.deepcopy(DEMO)
    for row in other["rows"]:
        row["step_s"] *= 2
        row["scaling"] /= 2
    for spans in other["timelines"].values():
        spans[0]["stop_s"] *= 2
    now, then = tables.pages(DEMO, SWEEP), tables.pages(other, SWEEP)
    assert [path.name for path in now if now[path] == then[path]] == []


def test_what_users_miss_stands_above_the_table_and_all_that_was_missed_below_it() -> None:
    accuracy = {"passed": False, "worse": "worse by 0.14", "headline": "its accuracy is worse"}
    sent = {"passed": False, "worse": "bytes off by +9 %", "headline": ""}
    text = " ".join(tables.gains({**DEMO, "checks": [accuracy, sent, {**sent, "passed": True}]}).split())
    above, _, below = text.partition("| plain DDP |")
    assert re.search(r"of the time, but [^.]*its accuracy is worse\.\*\*", above)
    assert "bytes" not in above.partition("| |")[0].replace("Bytes are counted", "")
    assert "Of the claims on the run's page, 1 of 3 hold. Missed: worse by 0.14; bytes off by +9 %." in below
    losses = {each["seed"]: each["losses"] for each in DEMO["courses"] if each["name"] == "ddp"}
    all_reach = [{**each, "losses": losses[each["seed"]]} for each in DEMO["courses"]]
    held = " ".join(
        tables.gains({**DEMO, "courses": all_reach, "checks": [{**sent, "passed": True}]}).split()
    )
    assert re.match(r"\*\*gradwire reached plain DDP's final loss in 0\.\d\d of the time\.\*\* ", held)
    assert "Missed" not in held


def test_the_picture_is_as_wide_as_a_page_and_stands_between_headline_and_table() -> None:
    [width] = re.findall(r'<svg [^>]*?width="(\d+)"', tables.pictures(DEMO)["loss-over-time.svg"])[:1]
    assert int(width) > 1012, "the widest that GitHub shows of a page"
    text = tables.gains(DEMO)
    places = [text.index(part) for part in ("of the time", "loss-over-time.svg", "| gradwire (")]
    assert places == sorted(places)


def test_claims_are_judged_by_the_numbers_that_are_kept() -> None:
    stale = copy.deepcopy(DEMO)
    stale["checks"] = [{"passed": True, "claim": "of yesterday"}]
    assert tables.small(stale) == DEMO
    for course in stale["courses"]:
        if course["name"] == "gradwire":
            course["step_s"] = [10 * step_s for step_s in course["step_s"]]
    assert [check["passed"] for check in tables.small(stale)["checks"]].count(False) >= 2


def test_a_line_of_the_sweep_is_a_row() -> None:
    name = tables.SETTINGS[2].name
    line = {"setting": name, "chosen": "int4(block=128)", "step_s": {"bound": 0.1, "ddp": 0.4, "auto": 0.2}}
    assert "| `chargpt` | 2 | 100mbit, 10ms | 25.0 % | 50.0 % (`int4`) |" in tables.measured(DEMO, [line])
    failed = {**line, "step_s": {"bound": 0.1, "ddp": 0.4, "auto": None}}
    assert "chargpt" not in tables.measured(DEMO, [failed])


def test_a_setting_that_was_measured_again_has_its_newest_row() -> None:
    newest: dict[str, str] = {}
    for path in (ROOT / "benchmarks" / "results").glob("sweep*.jsonl"):
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if "setting" in line:
                name, day = line["setting"], line["machine"]["date"]
                newest[name] = max(newest.get(name, ""), day)
    assert len(newest) == len(tables.SETTINGS)
    assert {line["setting"]: line["machine"]["date"] for line in SWEEP if "setting" in line} == newest


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
