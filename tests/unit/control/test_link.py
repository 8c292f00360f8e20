"""What the transport is told of the link."""

from __future__ import annotations

from itertools import cycle

import pytest

from gradwire.comm import Comm, run_ranks
from gradwire.measure.link import Traffic
from gradwire.planning.change_detection import WINDOW
from gradwire.planning.costs import Link
from tests.support.rig import Rig, gradients


def test_the_transport_hears_of_the_link_the_same_on_all_ranks_in_the_same_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def note(traffic: Traffic, _rounds: object) -> None:
        # Ranks differ, as they would: the shortest time counts.
        traffic.row = (0.0, 0.5 + next(noise), 1000.0, 1.0)

    noise = cycle([0.5, 0.0, 0.25])
    monkeypatch.setattr(Traffic, "note", note)

    def rank(comm: Comm) -> list[Link | None]:
        heard = list[Link | None]()
        rig = Rig(comm, "topk(ratio=0.1)", link_seen=heard.append)
        for step in range(WINDOW + 3):
            rig.step(gradients(comm.rank, step))
        return heard

    first, *others = run_ranks(3, rank)
    assert all(other == first for other in others)
    # A step's times ride on the verdict of the next one.
    assert first[:WINDOW] == WINDOW * [None]
    assert all(link is not None and link.beta_s > 0.0 for link in first[WINDOW + 1 :])


def test_dense_steps_that_measure_tell_nothing() -> None:
    def rank(comm: Comm) -> list[Link | None]:
        heard = list[Link | None]()
        rig = Rig(comm, "auto", link_seen=heard.append)
        rig.step(gradients(comm.rank, 0))
        return heard

    assert run_ranks(2, rank) == [[], []]
