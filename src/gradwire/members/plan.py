"""Plan of a round, computed from a roster. All members compute the same one.

No two exchanges have equal numbers, so members whose last rounds have equal numbers have equal shared
parameters. A number begins with the moment of the roster. If the lighthouse's clock is set back, the number
is still above all numbers under which a member of the roster has sent anything. Members that are elsewhere at
that time may have used that number, too: so it ends with digits made of the moment and of all processes in
the roster.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradwire.errors import GradwireError
from gradwire.members.base import Card, Roster

Cards = Mapping[str, Card]

ENDS = 2**48
"""As many ends a number may have."""


@dataclass(frozen=True)
class RoundPlan:
    """Members that meet, the member that gives others the shared parameters, and the number of the round."""

    names: tuple[str, ...]
    """Members in the order of their ranks: by name."""
    meeting: str
    """The name of the meeting."""
    is_new: bool
    """True if the meeting's groups must be made."""
    addresses: tuple[str, ...]
    """Addresses of the members' stores. They meet at the first one's."""
    run: str
    number: int
    begins: bool
    """True if no member has begun: then all take the source's parameters."""
    exchanges: bool
    """True if a round is due at any member."""
    source: str
    links: tuple[int, float]
    """Connections of a link and the round trip, the most that was measured; 0 connections are not known."""
    heals: tuple[str, ...]
    """Members that take the source's shared parameters, and drop their own progress."""


def planned(roster: Roster, me: str) -> RoundPlan:
    """Compute the plan of `roster` for the member with the id `me`.

    Raises `GradwireError` if this member cannot take part; the others then go on without it.
    """
    refused = dict[str, str]()
    ids, cards = _by_name(roster, refused)
    for rule in (_same_terms, _same_run, _not_ahead):
        for name, why in rule(cards).items():
            refused[ids[name]] = f"{name}: {why}"
            del cards[name]
    if me in refused:
        raise GradwireError(f"this replica cannot take part: {refused[me]}")
    names = tuple(sorted(cards))
    later = max(roster.moment, *(1 + max(card.number, card.tried) // ENDS for card in cards.values()))
    told = "+".join(f"{name}={ids[name]}" for name in names)
    fresh = _digest(f"{roster.moment} {told}")
    held = {cards[name].meeting for name in names}
    [kept] = held if len(held) == 1 else [""]
    source = _source(cards)
    heals = tuple(name for name in names if name != source and not _alike(cards[name], cards[source]))
    # A meeting's name ends with its members: the same ones may have left some of them out since. A member
    # that is healed gets a fresh reducer, which has not measured the link. As ranks choose collectives by the
    # link, all members get one.
    is_new = not kept or not kept.endswith(_digest(told)) or bool(heals)
    return RoundPlan(
        names=names,
        meeting=f"{fresh}-{_digest(told)}" if is_new else kept,
        is_new=is_new,
        addresses=tuple(cards[name].address for name in names),
        run=cards[source].run or fresh,
        number=later * ENDS + int(fresh, 16),
        begins=cards[source].rounds < 0,
        exchanges=not all(card.joins for card in cards.values()),
        source=source,
        links=max((card.connections, card.round_trip_s) for card in cards.values()),
        heals=heals,
    )


def awaited(roster: Roster) -> set[str]:
    """Ids of members that live and have not asked, if nobody in `roster` has landed a round since it started.

    Members that have only just come then ask again. One of the others may be in a run, and they would begin
    another one beside it, or go on from an old save.
    """
    cards = [each.card for each in roster.entries if each.card is not None]
    if any(card.established for card in cards):
        return set()
    return {id_ for card in cards for id_ in card.living} - {each.id for each in roster.entries}


def _by_name(roster: Roster, refused: dict[str, str]) -> tuple[dict[str, str], dict[str, Card]]:
    """Ids and cards of the roster by name. Members that cannot take part are added to `refused`, by id.

    Of two members with one name the younger stays, because the other may be gone already.
    """
    ids, cards = dict[str, str](), dict[str, Card]()
    entries = [(each.card.born, each.id, each.name, each.card) for each in roster.entries if each.card]
    for _born, id_, name, card in sorted(entries, key=lambda entry: entry[:2]):
        if name in ids:
            refused[ids[name]] = f"another process has taken its name {name!r}: give each replica its own"
        ids[name], cards[name] = id_, card
    return ids, cards


def _same_terms(cards: Cards) -> dict[str, str]:
    """Reasons for refusal, by name, of members whose terms differ from those of the run, or of most members
    before one has begun.
    """
    live = {name: card for name, card in cards.items() if card.established}
    chosen = cards[_furthest(live)] if live else _most(cards, lambda card: str(sorted(card.terms.items())))
    found = {}
    for name, card in cards.items():
        keys = sorted({*chosen.terms, *card.terms})
        wrong = [key for key in keys if chosen.terms.get(key) != card.terms.get(key)]
        if wrong:
            told = "; ".join(
                f"{key}: {card.terms.get(key)} here, {chosen.terms.get(key)} there" for key in wrong
            )
            found[name] = f"the others differ in {told}"
    return found


def _same_run(cards: Cards) -> dict[str, str]:
    """Refuse members that have just come, with a save of another run. Returns reasons by name.

    Members of runs that have begun apart are not refused: those of the run with fewer steps are healed.
    """
    begun = {name: card for name, card in cards.items() if card.run}
    if not begun:
        return {}
    run = begun[_furthest({name: card for name, card in begun.items() if not card.joins} or begun)].run
    why = "it comes from another run than the others, by its save: start it without, or with one of this run"
    return {name: why for name, card in begun.items() if card.joins and card.run != run}


def _not_ahead(cards: Cards) -> dict[str, str]:
    """Refuse members that have just started from a save with more rounds than the run has made.

    Nobody is refused unless two or more members are in the run already. Returns reasons by name.
    """
    live = [card.rounds for card in cards.values() if card.established]
    if len(live) < 2:
        return {}
    why = f"its save is ahead of the run, which has made {max(live)} rounds: start it without"
    return {name: why for name, card in cards.items() if not card.established and card.rounds > max(live)}


def _furthest(cards: Cards) -> str:
    """First of the members in whose shared parameters the most steps are counted.

    Of those with as many it is one that has made the most rounds, then one that has made the latest.
    """
    most = max(map(_progress, cards.values()))
    return min(name for name, card in cards.items() if _progress(card) == most)


def _progress(card: Card) -> tuple[int, int, int, str]:
    return card.counted, card.rounds, card.number, card.run


def _most(cards: Cards, key: Callable[[Card], str]) -> Card:
    """First card, by name, whose `key` is the most frequent one."""
    counts = Counter(map(key, cards.values()))
    most = max(counts.values())
    return next(cards[name] for name in sorted(cards) if counts[key(cards[name])] == most)


def _source(cards: Cards) -> str:
    """Name of the member whose shared parameters all members take over: one that is furthest.

    If such members have different parameters, because one has loaded other values, those of most members
    count; of members that have landed a round, if there are any.
    """
    most = _progress(cards[_furthest(cards)])
    latest = {name: card for name, card in cards.items() if _progress(card) == most}
    if max(card.rounds for card in latest.values()) < 0:
        return min(latest)
    live = {name: card for name, card in latest.items() if card.established} or latest
    checksum = _most(live, lambda card: card.checksum).checksum
    return min(name for name, card in latest.items() if card.checksum == checksum)


def _alike(one: Card, other: Card) -> bool:
    """True if two members have equal shared parameters. A member that has not begun has none."""
    return 0 <= one.rounds == other.rounds and (one.number, one.checksum) == (other.number, other.checksum)


def _digest(text: str | Sequence[str]) -> str:
    return hashlib.blake2b(str(text).encode(), digest_size=6).hexdigest()
