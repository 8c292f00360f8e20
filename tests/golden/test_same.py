"""The oracle of a restructuring: the same tree is the same twice, and what differs is named by its step."""

from __future__ import annotations

import pytest

from tests.golden.same import TREE, chosen, difference, rows_of
from tests.golden.steps import SCENES, Setting
from tests.support.recipes import EVERY_RECIPE

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.mark.rest
def test_every_scene_is_the_same_twice() -> None:
    one_each = [
        Setting(name, (scene.texts or ("topk(ratio=0.1)",))[0], 2 if 2 in scene.worlds else scene.worlds[0])
        for name, scene in SCENES.items()
    ]
    found = rows_of(TREE / "src", [*one_each, *one_each])
    for setting, rows in found.items():
        assert rows, setting
        assert not any("raised" in row for row in rows), rows[-1]
        assert difference(rows[: len(rows) // 2], rows[len(rows) // 2 :]) == ""


@pytest.mark.rest
def test_what_differs_is_named_by_its_first_step() -> None:
    shorter, longer, unknown = (
        Setting("warm-up", text, 2)
        for text in ("powersgd(warmup_steps=3)", "powersgd(warmup_steps=4)", "powersgd(warmup_epochs=3)")
    )
    found = rows_of(TREE / "src", [unknown, shorter, longer])
    assert difference(found[shorter], found[longer]) == "step 0: memory of rank 0, 1", "it names the recipe"
    for row in (*found[shorter], *found[longer]):
        del row["memory"]
    told = difference(found[shorter], found[longer])
    assert told.startswith("step 3: means of rank 0, 1; sent of rank 0, 1 ("), told
    told = difference(found[shorter], found[unknown])
    assert told.startswith(
        "step 0; there its end: ValueError: recipe 'powersgd' has no option 'warmup_epochs'"
    )


def test_recipes_are_chosen_by_label_name_or_text() -> None:
    by_name = chosen(["topk"], [2], [])
    assert {each.text for each in by_name} >= {EVERY_RECIPE["topk"], EVERY_RECIPE["topk, int8"]}
    assert any(" > " in each.text for each in by_name), "a switch to it counts"
    assert {each.text for each in chosen(["topk, int8"], [2], ["plain module"])} == {
        EVERY_RECIPE["topk, int8"]
    }
    assert chosen(["no such recipe"], [2], []) == []
