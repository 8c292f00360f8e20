"""Members: replicas that come and go, each under a name, and the roster of those in a round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol


@dataclass(frozen=True)
class Card:
    """Facts that a member states when it asks for a roster; all other members see them."""

    terms: Mapping[str, str]
    """Versions, recipe, model and settings, by name: the same for all members of a run."""
    address: str
    """"HOST:PORT" of this member's store, at which others can meet."""
    run: str = ""
    """Run of which it is a part; empty before its first round."""
    rounds: int = -1
    """Number of rounds that have landed in its parameters; below 0 before it has begun."""
    number: int = -1
    """Number of the last of these rounds. No other exchange has this number."""
    counted: int = 0
    """Steps that all these rounds have counted, as all members count them."""
    tried: int = -1
    """Highest number under which its Δ was sent, whether that round landed or not."""
    checksum: str = ""
    """Checksum of the shared parameters and the outer optimizer's state."""
    established: bool = False
    """True if a round has landed since this process started."""
    steps: int = 0
    """Steps since its Δ was last counted."""
    joins: bool = False
    """True if it has only just come, and no round is due here."""
    meeting: str = ""
    """Meeting whose groups it still has; empty if its last exchange failed."""
    connections: int = 0
    """Number of connections that a link needs; 0 if it has not been measured here yet."""
    round_trip_s: float = 0.0
    """Longest round trip between neighbours in seconds, measured with `connections`."""
    living: Sequence[str] = ()
    """Ids of all members that were alive when it asked, as far as it knows."""
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
                "counted": int,
                "tried": int,
                "steps": int,
                "connections": int,
                "living": list,
            }
            if not all(isinstance(getattr(card, name), kinds.get(name, (str, float, int))) for name in found):
                raise ValueError("values of other types")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is not the card of a member of gradwire: {error!r}") from error
        return replace(card, living=tuple(map(str, card.living)))


@dataclass(frozen=True)
class Entry:
    """A member in a roster."""

    name: str
    id: str
    """A name of this process, where `name` stays the same after a restart."""
    card: Card | None
    """The member's card; `None` if it is no member of gradwire."""


@dataclass(frozen=True)
class Roster:
    """Members that take part in the next round; equal for all of them."""

    moment: int
    """Number of the roster. Later rosters have higher numbers, as long as clocks run forwards."""
    entries: tuple[Entry, ...]


class Members(Protocol):
    """Way in which a replica finds the others. Only the first rank of a replica asks."""

    name: str
    """The name of this replica."""
    id: str
    """A name of this process."""
    address: str
    """The host name or address at which other members reach this replica."""

    alone_s: float | None
    """Seconds without a quorum after which local steps go on until there is one; `None` waits for it."""

    def ask(self, card: Card) -> Roster:
        """Wait for the next roster, with this member in it.

        Raises `TransportError` if there is none in time.
        """

    def close(self) -> None:
        """Leave. Idempotent."""


@dataclass(frozen=True)
class Event:
    """Something that happened to this member's rounds.

    - `what`: "joined", "left", "healed", "failed" or "given up".
    - `round`: number of rounds after which it happened.
    - `who`: the members concerned.
    - `seconds`: how long it took. `sent_bytes`: bytes that were moved for it.
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
