"""A trial of a store: does it do what rounds ask of it, and how fast?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from threading import Barrier, Thread
from typing import Any

from gradwire.members.bucket.objects import Objects, StoreError, created
from gradwire.members.bucket.records import random_text

RACES, RACERS = 5, 4
SIZE = 1 << 20
"""Bytes of the object by which the rate is measured."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried."""

    what: str
    holds: bool
    told: str


def findings(objects: Objects) -> Iterator[Finding]:
    """Try a store under a key of its own, and delete what was written. Yields one finding after the other.

    Raises `StoreError` where it does not answer, or refuses.
    """
    folder = f"check/{random_text()}"
    keys = list[str]()

    def key(name: str) -> str:
        keys.append(f"{folder}/{name}")
        return keys[-1]

    try:
        yield from _tried(objects, folder, key)
    except BaseException:
        with suppress(StoreError):  # what has failed first is what is said
            objects.delete(keys)
        raise
    objects.delete(keys)
    left = objects.list(folder)
    yield Finding("deletes", not left, f"{len(keys)} objects, of which {len(left)} are still listed")


def _tried(objects: Objects, folder: str, key: Callable[[str], str]) -> Iterator[Finding]:
    times_s = []
    for number in range(5):
        start_s = objects.now_s()
        objects.put(key(f"small-{number}"), b"0" * 200)
        times_s.append(objects.now_s() - start_s)
    yield Finding("writes", True, f"200 bytes in {1e3 * statistics.median(times_s):.0f} ms (median of 5)")
    first = key("once")
    held = (
        objects.create(first, b"one") and not objects.create(first, b"two") and objects.get(first) == b"one"
    )
    yield Finding("creates only what is absent", held, "a second create was refused" if held else _NO_CREATE)
    winners = [_race(objects, key(f"race-{number}")) for number in range(RACES)]
    won = all(each == 1 for each in winners)
    told = f"{RACES} races of {RACERS}: " + ("one winner each" if won else f"winners {winners}. {_NO_CREATE}")
    yield Finding("decides races", won, told)
    found = objects.list(folder)
    listed = f"{folder}/race-{RACES - 1}" in found
    yield Finding("lists at once what was written", listed, f"{len(found)} objects")
    before = found.get(f"{folder}/small-0", 0.0)
    objects.put(key("small-0"), b"1")
    now = objects.list(folder).get(f"{folder}/small-0", 0.0)
    yield Finding("says when an object was written", now >= before > 0.0, "times of the store's own clock")
    data = bytes(SIZE)
    start_s = objects.now_s()
    objects.put(key("large"), data)
    sent_s = objects.now_s() - start_s
    start_s = objects.now_s()
    same = objects.get(f"{folder}/large") == data
    read_s = objects.now_s() - start_s
    rates = [8e-6 * SIZE / max(each, 1e-9) for each in (sent_s, read_s)]
    told = f"1 MiB: {rates[0]:.0f} Mbit/s up, {rates[1]:.0f} Mbit/s down, with the request's own time"
    yield Finding("reads back", same, told)


_NO_CREATE = (
    "this store cannot create only what is absent, and rounds would be decided twice: take another one, or a "
    "newer version of its server"
)


def _race(objects: Objects, key: str) -> int:
    """Number of those who take themselves for the one that has created an object."""
    won, starts = list[Any](), Barrier(RACERS)

    def run() -> None:
        starts.wait()
        if created(objects, key, random_text().encode()):
            won.append(1)

    threads = [Thread(target=run) for _each in range(RACERS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return len(won)
