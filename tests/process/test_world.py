"""The world that scenes share: each finds it as the first did, and one that leaves it otherwise fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.world import Scenes, World, value

pytestmark = pytest.mark.process

MODULE = "tests.process.scenes_world"


def test_to_end_a_world_that_has_not_begun_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kept").touch()
    World().end()
    assert Path("kept").exists()


def test_scenes_share_processes_and_neither_groups_nor_random_numbers(tmp_path: Path) -> None:
    two, three = Scenes(MODULE, 2, tmp_path), Scenes(MODULE, 3, tmp_path)
    first, second, third = value(two, "first"), value(three, "second"), value(two, "third")
    assert first == third
    assert [each[1:3] for each in first] == [[2, 2.0]] * 2
    assert [each[1:3] for each in second] == [[3, 3.0]] * 3
    assert [each[0] for each in second][:2] == [each[0] for each in first], "the same processes"
    assert all(each[3] == first[0][3] for each in first + second)


@pytest.mark.parametrize(
    ("scene", "says"),
    [
        ("thread", "has left behind ['thread sleeper']"),
        ("lent", "has left behind ['group lent by gradwire']"),
        ("group", "has left behind groups with threads ['gloo_tcp_loop', "),
        ("fails", "ValueError: out of luck"),
        ("ends", "rank 1: it has ended"),
        *(
            pytest.param(*each, marks=pytest.mark.rest)
            for each in (
                ("hook", "behind ['hook after steps of all optimizers, from tests.process.scenes_world']"),
                ("recipe", "has left behind ['recipe mine']"),
                ("variable", "taken away ['variable OMP_NUM_THREADS=1']"),
                ("number of threads", 'has left behind ["2 threads of torch\'s"]'),
            )
        ),
    ],
)
def test_a_scene_that_fails_or_leaves_something_says_so_and_the_next_one_finds_nothing_of_it(
    scene: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError) as caught:
        value(Scenes(MODULE, 2, tmp_path, grace_s=1.0), scene)
    assert says in str(caught.value)
    assert [each[1:3] for each in value(Scenes(MODULE, 2, tmp_path), "after all")] == [[2, 2.0]] * 2
