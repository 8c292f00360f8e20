"""The progress of a run, as its objects tell it: in lines, and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from gradwire.errors import GradwireError, WireError
from gradwire.members.bucket.objects import Bucket, Objects
from gradwire.members.bucket.records import MEMBERS, Beat, Seal, offers_of, processes, seal_key


@dataclass(frozen=True)
class Sealed:
    """A round that was sealed."""

    round: int
    weights: dict[str, float]
    """Of the members that count, by name."""
    offered_bytes: int
    """Of their offers; 0 if these are not kept any more."""

    def __str__(self) -> str:
        who = ", ".join(f"{name} ({weight:g})" for name, weight in self.weights.items())
        who = who or "no site, because shared parameters differed"
        size = f", {self.offered_bytes / 1e6:.2f} MB" if self.offered_bytes else ""
        return f"round {self.round}: {who}{size}"


@dataclass(frozen=True)
class Living:
    """A member, by its last heartbeat."""

    name: str
    silent_s: float
    """Seconds by which the newest heartbeat of all is newer."""
    beat: Beat

    def __str__(self) -> str:
        loss = "" if self.beat.loss is None else f", loss {self.beat.loss:.4g}"
        state = "has left, or has not begun" if self.beat.joined < 0 else f"{self.beat.step} steps{loss}"
        return (
            f"{self.name}: round {max(self.beat.round, 0)}, {state}, last heard of {self.silent_s:.0f} s ago"
        )


def sealed(store: Bucket, first: int = 0) -> Iterator[Sealed]:
    """The rounds that are sealed, from `first` on. Raises `GradwireError` for a seal that is damaged."""
    round_ = first
    while (data := store.get(seal_key(round_))) is not None:
        try:
            seal = Seal.of(data)
        except WireError as error:
            raise GradwireError(f"the seal of round {round_} at {store.url} is damaged: {error}") from error
        sizes = store.sizes(offers_of(round_))
        size = sum(sizes.get(each.key, 0) for each in seal.offers)
        yield Sealed(round_, dict(zip(seal.names, (e.weight for e in seal.offers), strict=True)), size)
        round_ += 1


def living(objects: Objects) -> list[Living]:
    """The members, of each its youngest process, by name."""
    beats = objects.list(MEMBERS)
    newest = max(beats.values(), default=0.0)
    youngest = {name: key for key, name, _number in sorted(processes(beats), key=lambda each: each[2])}
    found = []
    for name, key in sorted(youngest.items()):
        try:
            found.append(Living(name, newest - beats[key], Beat.of(objects.get(key) or b"")))
        except WireError:
            continue
    return found


def page(url: str, rounds: list[Sealed], members: list[Living]) -> str:
    """One HTML page: members, and a row for each of the last rounds."""
    names = sorted({name for each in rounds for name in each.weights} | {each.name for each in members})
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{each.round}</td>"
        + "".join(
            f"<td>{each.weights[name]:g}</td>" if name in each.weights else "<td>–</td>" for name in names
        )
        + f"<td>{each.offered_bytes / 1e6:.2f}</td></tr>"
        for each in reversed(rounds[-1000:])
    )
    told = "".join(f"<li>{escape(str(each))}</li>" for each in members)
    return (
        "<!doctype html><meta charset='utf-8'><title>gradwire members</title>"
        "<style>body{font:15px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:right}"
        "tr:nth-child(even){background:#f3f3f3}</style>"
        f"<h1>{escape(url)}</h1><p>{len(rounds)} rounds</p><ul>{told}</ul>"
        f"<table><tr><th>round</th>{head}<th>MB offered</th></tr>{rows}</table>\n"
    )
