"""Members: replicas that come and go, each under a name, and the roster of those in a round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol


@dataclass(frozen=True)
class Card:
    """The things that a member says of itself when it asks for a roster; all other members see them."""

    terms: Mapping[str, str]
    """Versions, recipe, model and settings, by name: the same for all members of a run."""
    address: str
    """"HOST:PORT" of a store of its own, at which others can meet."""
    run: str = ""
    """The run that it is part of; empty before its first round."""
    rounds: int = -1
    """The rounds that have landed in what it has; below 0 before it has begun."""
    number: int = -1
    """Of the last of them. No other exchange has it."""
    tried: int = -1
    """The highest number under which its Δ has left, whether that round landed or not."""
    checksum: str = ""
    """Of the shared parameters and the outer optimizer's state."""
    established: bool = False
    """Whether a round has landed since this process started."""
    steps: int = 0
    """Steps since its Δ was last counted."""
    joins: bool = False
    """Whether it has only come, and no round is due here."""
    meeting: str = ""
    """The meeting whose groups it still has; empty if its last exchange failed."""
    connections: int = 0
    """Of a link, as many as it needs; 0 if nobody has measured that here yet."""
    round_trip_s: float = 0.0
    """The longest one between neighbours, measured with them."""
    born: float = 0.0
    """When the process started, in seconds: of two with one name, the younger one stays."""

    def as_dict(self) -> dict[str, str]:
        """Texts by name, as a lighthouse carries them."""
        return {name: json.dumps(value) for name, value in asdict(self).items()}

    @classmethod
    def of(cls, told: Mapping[Any, Any] | None) -> Card:
        """The inverse of `as_dict`. Raises `ValueError` for what no member of gradwire would say."""
        try:
            found = {each.name: json.loads((told or {})[each.name]) for each in fields(cls)}
            card = cls(**found)
            kinds = {
                "terms": dict,
                "established": bool,
                "joins": bool,
                "rounds": int,
                "number": int,
                "tried": int,
                "steps": int,
                "connections": int,
            }
            if not all(isinstance(getattr(card, name), kinds.get(name, (str, float, int))) for name in found):
                raise ValueError("values of other types")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is not the card of a member of gradwire: {error!r}") from error
        return card


@dataclass(frozen=True)
class Entry:
    """A member in a roster."""

    name: str
    id: str
    """A name of this process, where `name` stays the same after a restart."""
    card: Card | None
    """`None` if it is something else than a member of gradwire."""


@dataclass(frozen=True)
class Roster:
    """The members that take part in the next round, the same for all of them."""

    moment: int
    """A number that no other roster has; later ones have higher ones, as long as clocks run forwards."""
    entries: tuple[Entry, ...]


class Members(Protocol):
    """How a replica finds the others. Only the first rank of a replica asks."""

    name: str
    """The name of this replica."""
    id: str
    """A name of this process."""
    address: str
    """The host name or address at which other members reach this replica."""

    alone_s: float | None
    """With no quorum after so many seconds, local steps go on until there is one; `None` waits for it."""

    def ask(self, card: Card) -> Roster:
        """Wait for the next roster, with this member in it.

        Raises `TransportError` if there is none in time.
        """

    def close(self) -> None:
        """Leave. Idempotent."""


@dataclass(frozen=True)
class Event:
    """Something that happened to this member's rounds.

    `what` is "joined", "left", "healed", "failed" or "given up". `round` says after how many rounds that was,
    `who` are the members that it is about, `seconds` how long it took, and `sent_bytes` how many bytes were
    moved for it.
    """

    what: str
    round: int
    who: tuple[str, ...]
    seconds: float = 0.0
    sent_bytes: int = 0
    why: str = ""
    at: float = field(default=0.0, compare=False)
    """Wall-clock time, in seconds since 1970."""

    def __str__(self) -> str:
        of = f", {self.sent_bytes / 1e6:.1f} MB" if self.sent_bytes else ""
        why = f": {self.why}" if self.why else ""
        return f"after round {self.round}: {self.what} {', '.join(self.who)} ({self.seconds:.2f} s{of}){why}"
