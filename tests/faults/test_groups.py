"""Real ranks on a process group of our own: who waits for a sum, DDP too, sees why there is none."""

from __future__ import annotations

import pytest

from tests.faults.scenes_groups import UNLUCKY
from tests.support.ranks import Results, perform, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The scene, on two ranks of which one is killed."""
    return perform("tests.faults.scenes_groups", 2, tmp_path_factory.mktemp("groups"))


def test_survivors_of_a_killed_rank_never_get_what_was_not_summed(world: Results) -> None:
    assert list(world[UNLUCKY]) == []
    [seen] = value(world[:UNLUCKY], "left alone")
    for verb in ("wait", "all_reduce", "backward"):
        assert seen[verb][0] == "RuntimeError"
        assert "gloo" in seen[verb][1], verb
    # C++ has no types for Python's errors, so DDP's carries the name in its text.
    assert "RuntimeError: " in seen["backward"][1]
    assert seen["attached"][0] == "TransportError"
