"""Real ranks on process groups of our own: a caller that waits for a sum, DDP too, sees why there is none."""

from __future__ import annotations

import pytest

from tests.faults.scenes_groups import UNLUCKY
from tests.support.ranks import Results, perform, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All scenes, on two ranks of which one is killed in the last."""
    return perform("tests.faults.scenes_groups", 2, tmp_path_factory.mktemp("groups"))


def test_a_frame_that_one_rank_cannot_make_is_an_error_on_both(world: Results) -> None:
    for rank, found in enumerate(value(world, "failed encode")):
        name, text = ("Accident", "out of luck") if rank == UNLUCKY else ("PeerFailed", "another rank")
        for verb in ("wait", "all_reduce"):
            assert found["seen"][verb][0] == name
            assert text in found["seen"][verb][1]
        # C++ has no types for Python's errors, so DDP's carries the name in its text.
        assert found["seen"]["backward"][0] == "RuntimeError"
        assert f"{name}: " in found["seen"]["backward"][1]
        assert text in found["seen"]["backward"][1]
        assert found["after"] == [2.0], "the next sum is right again"


@pytest.mark.parametrize("backend", ["lossless", "delaying"])
def test_survivors_of_a_killed_rank_never_get_what_was_not_summed(world: Results, backend: str) -> None:
    assert list(world[UNLUCKY]) == ["failed encode"], "it was killed in the other scene"
    [seen] = value(world[:UNLUCKY], "left alone")
    lost = {"lossless": "a message of an all-reduce", "delaying": "gloo"}[backend]
    for verb in ("wait", "all_reduce", "backward"):
        assert lost in seen[backend][verb][1], verb
    kind = {"lossless": "TransportError", "delaying": "RuntimeError"}[backend]
    assert (seen[backend]["wait"][0], seen[backend]["all_reduce"][0]) == (kind, kind)
    assert seen[backend]["backward"][0] == "RuntimeError"
    assert f"{kind}: " in seen[backend]["backward"][1]
    assert seen[backend]["attached"][0] == "TransportError"
    later = "an earlier sum of this group has failed" in seen[backend]["all_reduce"][1]
    assert later == (backend == "lossless"), "gloo knows by itself that it is broken"
