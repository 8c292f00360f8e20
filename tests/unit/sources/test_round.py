"""What the next round of local steps brings, after what has happened to the last one: without ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire.sources.round import Round

Events = Callable[[Round], Round]


def sent(round_: Round) -> Round:
    return round_.due(30).sent(30, 10)


ROWS: dict[str, tuple[Events, int, bool, int]] = {
    # what has happened to a round after 30 steps, and steps now: whether the next one brings something, and
    # how many steps no round has counted
    "it is under way": (sent, 34, True, 34),
    "it has landed": (lambda r: sent(r).received(brings=True, told=True).landed(), 34, True, 4),
    "it has landed, and no step was made since": (
        lambda r: sent(r).received(brings=True, told=True).landed(), 30, False, 0,
    ),
    "it brought nothing": (lambda r: sent(r).received(brings=False, told=True), 30, True, 30),
    "another rank of the replica has not got it": (
        lambda r: sent(r).received(brings=True, told=True).lost(), 30, True, 30,
    ),
    "the shared parameters are another's": (lambda r: sent(r).anew(34), 34, False, 0),
    "its offer is not counted yet": (lambda r: r.due(30).offered(30), 34, True, 34),
    "its offer counts": (lambda r: r.due(30).offered(30).landed(), 34, True, 4),
    "what it had was not finite": (lambda r: r.due(30).checked(sound=False).dropped(30), 34, True, 4),
    "a save of it has landed": (
        lambda r: Round.of(
            {"flight": {"lands_at": 40, "means": {}}, **sent(r).state(), **sent(r).state_among_members()}
        ).received(brings=True, told=False).landed(), 34, True, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_what_the_next_round_brings(row: str) -> None:
    happens, steps, has_learned, uncounted = ROWS[row]
    round_ = happens(Round())
    assert round_.has_learned(steps) == has_learned
    assert steps - round_.counted_at == uncounted


def test_a_round_lands_when_its_delay_is_over_and_never_twice() -> None:
    under_way = Round().sent(30, 10)
    assert [under_way.lands_by(steps) for steps in (30, 39, 40, 50)] == [False, False, True, True]
    assert not under_way.received(brings=True, told=True).lands_by(50)
    assert not under_way.lost().lands_by(50)
    assert Round().sent(30, 0).lands_by(30)
    assert under_way.lands(None).lands_at is None
    assert under_way.lands(35).lands_by(35)


def test_what_was_loaded_is_told_until_all_ranks_have_heard_it() -> None:
    a, b = {"a": 1}, {"b": 2}
    part = Round().begun_from(a, None, whole=False).begun_from(b, 40, whole=False)
    assert part.loaded == {"a": 1, "b": 2, "gradwire: thrown away": 40}
    assert part.begun_from(b, 40, whole=True).loaded == b
    assert part.received(brings=False, told=False).loaded == part.loaded, "the others have not heard it"
    assert part.received(brings=False, told=True).loaded == {}
    assert part.agreed().loaded == part.anew(7).loaded == {}
    assert Round.of(part.state()).loaded == part.loaded


def test_rounds_that_are_not_finite_are_counted_in_a_row() -> None:
    twice = Round().checked(sound=False).checked(sound=False)
    assert twice.unsound == Round.of(twice.state()).unsound == 2
    assert twice.checked(sound=True).unsound == twice.anew(3).unsound == 0


def test_a_round_under_way_in_a_save_is_under_way_again() -> None:
    brings, nothing = {"lands_at": 40, "means": {}}, {"lands_at": 40, "means": None}
    assert Round().resumed(brings) == Round(lands_at=40, saved_means=True)
    assert Round().resumed(nothing) == Round(lands_at=40, saved_means=False)
    assert Round(lands_at=9, saved_means=True).resumed(None) == Round()
    assert Round().resumed(brings).received(brings=True, told=False) == Round()
