"""Settings that do not fit into memory are refused while there is still some."""

import pytest

from gradwire_lab.bench.runner import Room, TooLarge


def _room(settings: int, readings: list[int | None]) -> Room:
    return Room(settings, lambda: readings.pop(0))


def test_what_fits_is_let_through() -> None:
    room = _room(3, [100, 70, 40, 10])
    for _ in range(3):
        room.after_one()


def test_what_does_not_fit_is_refused_after_the_first_setting() -> None:
    room = _room(3, [100, 60])
    with pytest.raises(TooLarge, match="for 2 more settings"):
        room.after_one()


def test_the_largest_counts_and_the_last_is_never_refused() -> None:
    room = _room(3, [100, 70, 65])
    room.after_one()
    room.after_one()
    room = _room(1, [100, 1])
    room.after_one()


def test_a_system_that_says_nothing_is_believed_to_have_enough() -> None:
    _room(100, [None, None]).after_one()
