"""What the transport is told of the link."""

from __future__ import annotations

from itertools import cycle

import pytest

from gradwire.comm import Comm, run_ranks
from gradwire.measure.link import LinkTraffic
from gradwire.planning.change_detection import WINDOW
from tests.support.rig import Rig, gradients


def test_the_transport_hears_of_the_link_the_same_on_all_ranks_in_the_same_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def note(traffic: LinkTraffic, _rounds: object) -> None:
        # Ranks differ, as they would: the shortest time counts.
        traffic.row = (0.0, 0.5 + next(noise), 1000.0, 1.0)

    noise = cycle([0.5, 0.0, 0.25])
    monkeypatch.setattr(LinkTraffic, "note", note)

    def rank(comm: Comm) -> list[tuple[int, float]]:
        heard = list[tuple[int, float]]()
        on_link = lambda byte_s: heard.append((rig.reducer.step, byte_s))  # noqa: E731
        rig = Rig(comm, "topk(ratio=0.1)", on_link=on_link)
        for step in range(WINDOW + 3):
            rig.step(gradients(comm.rank, step))
        return heard

    first, *others = run_ranks(3, rank)
    assert all(other == first for other in others)
    # A step's times ride on the status vote of the next one.
    assert [step for step, _ in first] == [WINDOW + 1, WINDOW + 2, WINDOW + 3]
    assert all(byte_s > 0.0 for _, byte_s in first)


def test_dense_steps_that_measure_tell_nothing() -> None:
    def rank(comm: Comm) -> list[float]:
        heard = list[float]()
        rig = Rig(comm, "auto", on_link=heard.append)
        rig.step(gradients(comm.rank, 0))
        return heard

    assert run_ranks(2, rank) == [[], []]
