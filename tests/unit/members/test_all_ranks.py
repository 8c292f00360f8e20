"""Rounds of a site with several ranks, which are threads: what all of them do, hear and raise."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gradwire.comm import Comm, run_ranks
from gradwire.errors import GradwireError, PeerFailed
from gradwire.members.bucket import all_ranks
from gradwire.members.bucket.all_ranks import AllRanks, Interrupted
from gradwire.members.bucket.objects import StoreError
from gradwire.members.site import Site


class Part:
    """A rank's part of a replica, which notes what it was asked."""

    def __init__(self, comm: Comm) -> None:
        self.site, self.asked = Site(comm), list[Any]()
        self.fails: BaseException | None = None

    def digest(self) -> str:
        self.asked.append("digest")
        if self.fails is not None:
            raise self.fails
        return f"of rank {self.site.rank}"

    def offer(self, round_: int) -> tuple[bytes, float]:
        self.asked.append(("offer", round_))
        return bytes([self.site.rank]), 1.0

    def land(self, round_: int, offers: Any, *, mine: bool) -> None:
        self.asked.append(("land", round_, list(offers), mine))


class Rank:
    """A rank of a site, and what it has heard."""

    def __init__(self, comm: Comm) -> None:
        self.part, self.heard = Part(comm), list[Any]()
        replica: Any = self.part
        self.all = AllRanks(
            replica, lambda: {"round": 7}, self.heard.append, lambda: self.heard.append("landed")
        )


def of_two(body: Any) -> list[Any]:
    return run_ranks(2, lambda comm: body(Rank(comm)))


def test_what_rounds_ask_is_done_on_all_ranks_and_the_first_one_answers() -> None:
    def body(rank: Rank) -> Any:
        answers = list[Any]()

        def rounds() -> None:
            answers.extend([rank.all.offer(3), rank.all.digest()])
            offers: Any = ["an offer"]
            rank.all.land(3, offers, mine=True)
            rank.all.landed()

        rank.all.run(rounds)
        return answers, rank.part.asked, rank.heard

    told = {"round": 7}
    asked = [("offer", 3), "digest", ("land", 3, ["an offer"], True)]
    first = [(b"\x00", 1.0), "of rank 0"], asked, [told, "landed", told]
    second = [], [*asked[:2], ("land", 3, [], True)], [told, "landed", told]
    assert of_two(body) == [first, second]


def test_an_error_of_a_rank_is_heard_by_all_and_by_the_rounds_and_the_next_ones_run() -> None:
    def body(rank: Rank) -> Any:
        rank.part.fails = MemoryError("no memory") if rank.part.site.rank == 1 else None
        heard, digests = list[str](), list[str]()

        def rounds() -> None:
            try:
                rank.all.digest()
            except PeerFailed as error:
                heard.append(str(error))
                raise

        def again() -> None:
            digests.append(rank.all.digest())

        with pytest.raises((MemoryError, PeerFailed), match="no memory"):
            rank.all.run(rounds)
        rank.part.fails = None
        rank.all.run(again)
        return heard, digests

    first, second = of_two(body)
    assert first == (
        ["rank 1 could not take part in a round (digest): MemoryError: no memory"],
        ["of rank 0"],
    )
    assert second == ([], [])


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (StoreError("no answer"), StoreError, "no answer"),
        (GradwireError("another has the name"), GradwireError, "another has the name"),
        (KeyError("x"), (KeyError, GradwireError), "'x'"),
    ],
)
def test_an_error_of_the_rounds_is_raised_on_all_ranks(error: Exception, kind: Any, text: str) -> None:
    def body(rank: Rank) -> Any:
        def rounds() -> None:
            raise error

        with pytest.raises(kind, match=text):
            rank.all.run(rounds)
        return rank.heard

    assert of_two(body) == [[{"round": 7}]] * 2


def test_ranks_hear_while_rounds_wait_and_interrupted_rounds_end_before_others_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(all_ranks, "TELL_S", 0.01)

    def body(rank: Rank) -> Any:
        order, told = list[str](), rank.part.site.told

        def interrupted(text: str) -> str:
            heard = told(text)
            if '"wait"' in heard:
                order.append("interrupted")
                raise KeyboardInterrupt
            return heard

        def waits() -> None:
            try:
                while True:
                    rank.all.require_running()
                    time.sleep(0.01)
            except Interrupted:
                order.append("rounds have ended")
                raise

        with monkeypatch.context() as patched:
            patched.setattr(rank.part.site, "told", interrupted)
            with pytest.raises(KeyboardInterrupt):
                rank.all.run(waits)
        rank.all.run(lambda: order.append("others"))
        return order

    assert of_two(body) == [["interrupted", "rounds have ended", "others"], ["interrupted"]]
