"""The status vote is the same, row for row, by whatever algorithm the ranks' table is added up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.comm import Comm, run_ranks
from gradwire.comm.base import Algorithm
from gradwire.measure.metered import MeteredComm
from gradwire.step import status_vote as vote_module
from gradwire.step.status_vote import RankReport, StatusVote
from tests.support.looped import looped

FINE = RankReport(finite=True, failed=False, fingerprint=7, facts=(0.1, 0.0, 0.0, 0.0), computing_s=0.25)
ROWS = (
    FINE,
    replace(FINE, finite=False),
    replace(FINE, failed=True),
    replace(FINE, fingerprint=2**24 - 1),
    replace(FINE, stale=True),
    replace(FINE, computing_s=1e9),
    # Facts may be anything. Added to something else than zeros they would not come as they were said.
    replace(FINE, facts=(torch.finfo(torch.float32).max, 1e-45, -torch.inf, torch.nan)),
)


def told(comm: Comm) -> list[str]:
    """What this rank reads until each rank has had each of `ROWS`; as text, since NaN is not equal to NaN."""
    found = []
    for turn in range(len(ROWS)):
        tail = StatusVote([], ROWS[(comm.rank + turn) % len(ROWS)], MeteredComm(comm), torch.device("cpu"))
        tail.send()
        found.append(str(tail.votes().rows))
    return found


@looped("world", range(2, 18), few=1)
def test_every_row_comes_by_a_tree_as_it_comes_by_the_library_and_direct(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by(way: Algorithm) -> list[list[str]]:
        monkeypatch.setattr(vote_module, "shortest_sum", lambda *_size: way)
        return run_ranks(world, told)

    first, *others = by("tree")
    assert all(other == first for other in others)
    assert by("library") == by("direct") == [first] * world
    assert len(set(first)) == len(ROWS), "each of them says something else"
