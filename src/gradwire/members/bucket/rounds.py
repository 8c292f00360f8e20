"""Rounds over an object store: one algorithm, over the small interface `Objects`.

A round is decided by an object that is *created only if absent*, its seal. It names the offers that count,
so there is no moment at which some members take a round for landed and others for lost. What a member has
learned is in at most one offer that is named:

- A seal names one offer of each name. A seal is final, so an offer that it does not name never counts, and
  may be offered again in the next round.
- Before a member offers anything, it has landed all seals that there are. If one names another process of
  its own name, what it has may be in that: it is dropped. So a process that was started again from a save
  counts nothing twice.

The order of a seal is the order in which all add up, so that members with equal parameters before have
equal ones after. Clocks of machines play no part: the store's times of heartbeats tell who lives.

Members count together if they offer against equal parameters. Where no parameters are those of more than
half, and of as many as a round needs, the round is sealed without any offer: all take the newest snapshot,
and land from there what was sealed after it. So the bucket decides whose parameters are right.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gradwire.errors import GradwireError, TransportError, WireError
from gradwire.members.bucket.objects import Objects, StoreError, created, held_after
from gradwire.members.bucket.records import (
    MEMBERS,
    OFFERS,
    SNAPSHOTS,
    SPEC,
    THETAS,
    Beat,
    Counted,
    Offer,
    Seal,
    Snapshot,
    Spec,
    by_round,
    digest_of,
    member_key,
    new_theta,
    offers_of,
    processes,
    random_text,
    seal_key,
    snapshot_key,
    who,
)

T = TypeVar("T")

KEPT = 2
"""Snapshots that are kept, the newest ones."""
LEAST_DEAD_S = 5.0
"""Nothing stands on less: stores tell times in seconds, and requests take some."""
LOOK_S, LONGEST_LOOK_S = 0.1, 2.0
"""First and longest pause between two looks for a seal."""
NO_MORE = 10**8
"""After all rounds, which have eight digits in keys."""
SHOWN = 80
"""Characters that are shown of a setting that differs."""
MOST_IN_VAIN = 2
"""Rounds in a row after which parameters that still differ are no flipped bits."""
ATTEMPTS = 20
"""Attempts to take a snapshot while others prune; far more than it takes."""


@dataclass(frozen=True)
class Rules:
    """When a round is sealed, and what is kept. Times are in seconds."""

    at_least: int = 2
    """Offers that a round needs."""
    patience_s: float = 60.0
    """So long members that live are waited for, from one's own offer on."""
    wait_s: float = 3600.0
    """A wait for a seal is an error after so long."""
    beat_s: float = 10.0
    """Between two heartbeats."""
    late_rounds: int = 2
    """Further rounds in which Δ that was not sealed is offered again, before it is dropped."""
    snapshot_every: int = 10
    """Rounds from one snapshot to the next."""

    @property
    def dead_s(self) -> float:
        """A member that was not heard of for so long is taken to be dead."""
        return max(LEAST_DEAD_S, 3.0 * self.beat_s)


class Replica(Protocol):
    """Parameters of a member, and what it has learned since (Δ)."""

    def digest(self) -> str:
        """Digest of the shared state: equal only if that is equal bit for bit."""

    def offer(self, round_: int) -> tuple[bytes, float] | None:
        """Payload and weight of Δ; `None` if there is nothing to count. Changes nothing that lasts: if the
        offer is not sealed, it never was."""

    def land(self, round_: int, offers: Sequence[Offer], *, mine: bool) -> None:
        """Step the shared parameters by the mean of `offers`, and go on from them.

        `mine` says that the last offer of this process is among them: then Δ is what was learned since.
        Otherwise Δ stays as it is.
        """

    def discard(self) -> bool:
        """Go on from the shared parameters without Δ. Returns whether something is lost by that."""

    def give(self) -> bytes:
        """The shared state."""

    def take(self, data: bytes) -> None:
        """Take over a shared state. Δ is dropped."""


Tell = Callable[[str, tuple[str, ...], str], None]
"""Called with what has happened, the members concerned, and why."""


def _silent(_what: str, _who: tuple[str, ...], _why: str) -> None:
    """Tell nobody."""


@dataclass
class Seat:
    """The place of a process in a run."""

    objects: Objects
    name: str
    number: int
    """How many processes had this name before."""
    rules: Rules
    run: str = ""
    round: int = -1
    """Rounds that have landed here."""
    joined: int = -1
    reads: int = -1
    passes: int = -1
    writes: int = -1
    """See `Beat`."""
    offered: str = ""
    """Key of an offer to the present round; empty if there is none."""
    content: bytes = b""
    """The bytes of that offer, which this process need not read again."""
    is_there: bool = False
    """Whether the store has said that the offer is there."""
    trains_alone: bool = False
    """True if local steps go on without the store: it is asked again when the next round is due."""
    waits_since: int = -1
    """First round to which Δ was offered without being sealed; below 0 for none."""
    strayed: int = -1
    """Round before which the shared parameters were last found to differ from the others'."""
    in_vain: int = 0
    """Last rounds in a row that were sealed without any offer."""
    lost: int = 0
    """Times that Δ was dropped."""
    names: tuple[str, ...] = ()
    """Members in the last round that has landed here."""
    step: int = 0
    """Attempted steps, for heartbeats."""
    loss: float | None = None
    """Last loss that was noted, for heartbeats."""
    tell: Tell = _silent
    landed: Callable[[tuple[str, ...]], None] = lambda _before: None
    """Called when a round has landed here, with the members of the one before."""
    spec: Spec = field(default_factory=lambda: Spec("", {}, ""))
    has_left: bool = False
    _beats: threading.Lock = field(default_factory=threading.Lock)
    """Held while a heartbeat is written, so that a slow one is not written over a newer one."""

    @property
    def who(self) -> str:
        """Name and number of this process."""
        return who(self.name, self.number)

    def beat(self) -> None:
        """Write a heartbeat, unless this process has left. Raises `StoreError`."""
        with self._beats:
            if not self.has_left:
                told = Beat(
                    random_text(),
                    self.round,
                    self.joined,
                    self.reads,
                    self.passes,
                    self.writes,
                    self.step,
                    self.loss,
                )
                self.objects.put(member_key(self.name, self.number), told.as_bytes())

    def leave(self) -> None:
        """Write the last heartbeat: nobody waits for this process any more. Raises `StoreError`."""
        self.has_left = True
        with self._beats:
            self.objects.put(member_key(self.name, self.number), Beat(random_text(), self.round).as_bytes())


# -- to enter a run


def enter(
    objects: Objects,
    name: str,
    terms: Mapping[str, str],
    replica: Replica,
    rules: Rules,
    saved: tuple[str, int, int] | None = None,
    *,
    tell: Tell = _silent,
    seated: Callable[[Seat], object] = lambda _seat: None,
) -> Seat:
    """Enter the run in `objects`, or begin it if there is none.

    Args:
        objects: the store.
        name: of the member. A process that had it before is taken to be gone.
        terms: settings that all members must share.
        replica: has parameters of its own, or those of a save.
        rules: of rounds.
        saved: run, round and first unsealed offer (`Seat.waits_since`) of the save that the replica has.
        tell: is told what happens.
        seated: called once the process has its place. From then on it must write heartbeats.

    Raises `GradwireError` if the terms are not those of the run, or the save is of another one.
    """
    spec = _spec(objects)
    if spec is not None:
        _require_same(spec, terms)
        if saved is not None and saved[0] != spec.run:
            raise GradwireError(
                "the save is of another run than the one at this URL: start without resume=, or elsewhere"
            )
    elif saved is not None:
        raise GradwireError(
            "the save is of a run that is not at this URL: mend the URL, or start without resume="
        )
    seat = _seated(objects, name, rules)
    seat.tell = tell
    seated(seat)
    begins = False
    if spec is None:
        spec, begins = _begun(objects, terms, replica)
        _require_same(spec, terms)
    seat.run, seat.spec = spec.run, spec
    if saved is not None:
        seat.round, seat.waits_since = saved[1], saved[2]
    elif begins:
        seat.round = 0
    else:
        take_newest(seat, replica)
    catch_up(seat, replica)
    seat.joined = seat.round
    seat.beat()
    if not begins:
        age_s = _age_s(seat, SPEC)
        tell("joined", (name,), f"a run that began {age_s / 60:.0f} minutes ago, after {seat.round} rounds")
    return seat


def _spec(objects: Objects) -> Spec | None:
    data = objects.get(SPEC)
    return None if data is None else Spec.of(data)


def _begun(objects: Objects, terms: Mapping[str, str], replica: Replica) -> tuple[Spec, bool]:
    """Begin a run with this replica's parameters, unless another member is first.

    The parameters are there before the spec that names them: one that dies here leaves nothing half made.
    Returns the spec, and whether it is this one's.
    """
    theta = new_theta(0)
    objects.put(theta, replica.give())
    mine = Spec(random_text(), dict(terms), theta)
    is_mine = created(objects, SPEC, mine.as_bytes())
    if is_mine:
        return mine, True
    objects.delete([theta])
    found = _spec(objects)
    assert found is not None, "specs are never deleted"
    return found, False


def _require_same(spec: Spec, terms: Mapping[str, str]) -> None:
    wrong = [key for key in sorted({*spec.terms, *terms}) if spec.terms.get(key) != terms.get(key)]
    if wrong:
        told = "; ".join(_compared(key, terms.get(key, "none"), spec.terms.get(key, "none")) for key in wrong)
        raise GradwireError(
            f"the run at this URL has other settings: {told}. Start with its settings, or begin a new run at "
            "another URL"
        )


def _compared(key: str, here: str, there: str) -> str:
    """A setting here and there; of long texts the part from shortly before their first difference."""
    alike = [*(one == other for one, other in zip(here, there, strict=False)), False].index(False)
    first = max(alike - SHOWN // 2, 0) if max(len(here), len(there)) > SHOWN else 0

    def part(text: str) -> str:
        shown = text[first : first + SHOWN]
        return ("…" if first else "") + shown + ("…" if len(text) > first + SHOWN else "")

    return f"{key}: {part(here)} here, {part(there)} there"


def _seated(objects: Objects, name: str, rules: Rules) -> Seat:
    """Take the next number of `name`. Two processes that start at once get different ones."""
    while True:
        seat = Seat(objects, name, _last_number(objects, name) + 1, rules)
        if created(objects, member_key(name, seat.number), Beat(random_text(), -1).as_bytes()):
            return seat


def _last_number(objects: Objects, name: str) -> int:
    return max(
        (number for _key, other, number in processes(objects.list(MEMBERS)) if other == name), default=-1
    )


def _age_s(seat: Seat, key: str) -> float:
    """Seconds since an object was written, by the store's clock."""
    mine = member_key(seat.name, seat.number)
    now = seat.objects.list(MEMBERS).get(mine, 0.0)
    return max(now - seat.objects.list("").get(key, now), 0.0)


# -- to follow a run


def take_newest(seat: Seat, replica: Replica) -> None:
    """Take over the newest snapshot. The rounds after it are landed by `catch_up`.

    The heartbeat says which one is read, before it is read: who prunes leaves it, and the offers after it.
    """
    for _ in range(ATTEMPTS):
        found = _newest(seat)
        seat.reads = found.round
        seat.beat()
        data = seat.objects.get(found.theta)
        if data is None:  # pruned, as there is a newer one
            continue
        if found.digest and digest_of(data) != found.digest:
            raise GradwireError(f"the snapshot {found.theta} of round {found.round} is damaged")
        replica.take(data)
        seat.round, seat.waits_since, seat.in_vain = found.round, -1, 0
        seat.offered, seat.content = "", b""
        return
    raise GradwireError("no snapshot of the run can be read: its objects were deleted by something else")


def _newest(seat: Seat) -> Snapshot:
    """The newest snapshot: that before round 0 is named by the spec."""
    for _round, key in reversed(by_round(seat.objects.list(SNAPSHOTS))):
        data = seat.objects.get(key)
        if data is not None:
            return Snapshot.of(data)
    return Snapshot(0, seat.spec.theta, "")


def catch_up(seat: Seat, replica: Replica) -> None:
    """Land all rounds that are sealed."""
    while (data := seat.objects.get(seal_key(seat.round))) is not None:
        seal = Seal.of(data)
        land(seat, replica, seal, _read(seat.objects, seal, {}))
    seat.reads = -1


def _read(
    objects: Objects, seal: Seal, known: Mapping[str, tuple[Offer, Counted] | None]
) -> list[Offer] | None:
    """The offers that count, in order. Those that are `known` by their keys are not read again, if they are
    what was sealed. `None` if others are gone: there is a newer snapshot then.
    """
    offers = []
    for each in seal.offers:
        found = known.get(each.key)
        if found is not None and found[1].digest == each.digest:
            offers.append(found[0])
            continue
        data = objects.get(each.key)
        if data is None or digest_of(data) != each.digest:
            return None
        offers.append(Offer.of(data))
    return offers


def land(seat: Seat, replica: Replica, seal: Seal, offers: Sequence[Offer] | None) -> None:
    """Land a sealed round, or take over a snapshot if this replica cannot."""
    if offers is None:
        _heal(seat, replica, "its rounds are not kept any more")
        if seat.round <= seal.round:
            raise GradwireError(
                f"round {seal.round} is sealed, and its offers are gone: something else has deleted objects "
                "of the run. Begin a new one at another URL, from a save"
            )
        return
    if not offers:
        _land_nothing(seat, replica, seal)
        return
    if seal.theta != replica.digest():
        if seat.strayed >= seal.round:
            raise _strays(seal.round)
        _heal(seat, replica, "its shared parameters differ from those of the others")
        seat.strayed = seal.round
        return
    counted = [each.key for each in seal.offers]
    mine = seat.offered != "" and seat.offered in counted
    replica.land(seal.round, offers, mine=mine)
    was_offered = seat.offered != ""
    seat.offered, seat.content = "", b""
    before, seat.names = seat.names, seal.names
    seat.round += 1
    seat.in_vain = 0
    if mine:
        seat.waits_since = -1
    else:
        _keep_or_drop(seat, replica, seal, was_offered=was_offered)
    seat.landed(before)


def _land_nothing(seat: Seat, replica: Replica, seal: Seal) -> None:
    """Land a round that was sealed because parameters differ: this replica begins anew from the snapshot.

    It comes by this seal once more on its way from the snapshot.
    """
    if seat.strayed < seal.round:
        _heal(seat, replica, "the members' shared parameters differ, and none are those of most")
        seat.strayed = seal.round
        return
    seat.round += 1
    seat.in_vain += 1


def _strays(round_: int) -> GradwireError:
    return GradwireError(
        f"before round {round_} the shared parameters come out otherwise here than at the others, also from "
        "their snapshot: use the same versions of torch and numba, and the same kind of CPU"
    )


def _keep_or_drop(seat: Seat, replica: Replica, seal: Seal, *, was_offered: bool) -> None:
    """Keep Δ for a later round, after one that has landed without it, or drop it."""
    if was_offered and seat.waits_since < 0:
        seat.waits_since = seal.round
    mine = f"{offers_of(seal.round)}/{seat.who}"  # lands again on the way from a snapshot: Δ is newer
    if seat.name in seal.names and all(each.key != mine for each in seal.offers):
        why = "another process of this name has offered: what this one has may be in it"
    elif seat.waits_since >= 0 and seat.round > seat.waits_since + seat.rules.late_rounds:
        why = f"it came too late for {seat.rules.late_rounds + 1} rounds"
    else:
        return
    seat.waits_since = -1
    if replica.discard():
        seat.lost += 1
        seat.tell("dropped", (seat.name,), why)


def _heal(seat: Seat, replica: Replica, why: str) -> None:
    """Take over the newest snapshot. Δ is dropped."""
    if replica.discard():
        seat.lost += 1
    take_newest(seat, replica)
    seat.tell("healed", (seat.name,), f"{why}: it takes the snapshot of round {seat.round}")


def patiently(seat: Seat, do: Callable[[], T]) -> T:
    """Call `do` until the store answers. Raises its error after `Rules.wait_s`, and at once if the seat
    `trains_alone`.
    """
    began_s, said = seat.objects.now_s(), ""
    while True:
        try:
            return do()
        except StoreError as error:
            if seat.trains_alone or seat.objects.now_s() - began_s > seat.rules.wait_s:
                raise
            if str(error) != said:
                said = str(error)
                seat.tell("waits", (seat.name,), said)
        seat.objects.pause(LONGEST_LOOK_S)


# -- a round


def send(seat: Seat, replica: Replica) -> bool:
    """Land what is sealed, and offer Δ to the present round. Returns whether there is an offer to wait for.

    An offer never changes: if one of this process stands already, that one is waited for.
    """
    patiently(seat, lambda: catch_up(seat, replica))
    seat.passes = -1  # not before: others would wait for one that cannot follow
    if seat.offered and seat.is_there:
        return True
    if not seat.offered and not _offers(seat, replica):
        return False
    if not patiently(seat, lambda: created(seat.objects, seat.offered, seat.content)):
        raise GradwireError(
            f"{seat.offered} was written by something else: give each replica a name of its own"
        )
    seat.is_there = True
    return True


def _offers(seat: Seat, replica: Replica) -> bool:
    """Make an offer that is still to be sent, if there is something to offer."""
    content = replica.offer(seat.round)
    if content is None:
        seat.passes = seat.round
        patiently(seat, seat.beat)
        return False
    seat.offered = f"{offers_of(seat.round)}/{seat.who}"  # it may be there although no answer comes
    offer = Offer(seat.round, replica.digest(), content[1], content[0], random_text())
    seat.content, seat.is_there = offer.as_bytes(), False
    return True


def settle(
    seat: Seat,
    goes_on: Callable[[], bool] = lambda: True,
    fits: Callable[[Offer], bool] = lambda _offer: True,
) -> tuple[Seal, list[Offer] | None]:
    """Wait for the seal of the present round, and create it if it is time. Only reads and writes objects, so
    that training may go on meanwhile.

    Args:
        seat: of this process, which has made an offer.
        goes_on: False ends the wait with an error.
        fits: whether an offer can be decoded here. Others are not named.

    Returns the seal, and the offers that it names; `None` if they are gone already.

    Raises `TransportError` after `Rules.wait_s`, unless the seat `trains_alone`, and `GradwireError` if a
    younger process has this name.
    """
    objects, rules, began_s, look_s = seat.objects, seat.rules, seat.objects.now_s(), LOOK_S
    own, problem = Offer.of(seat.content), ""
    known: dict[str, tuple[Offer, Counted] | None] = {  # none of them changes, also what is no offer
        seat.offered: (own, Counted(seat.offered, digest_of(seat.content), own.weight))
    }
    while goes_on():
        try:
            sealed = objects.get(seal_key(seat.round))
            if sealed is None:
                offered = _one_per_name(objects.list(offers_of(seat.round)))
                is_late = objects.now_s() - began_s > rules.patience_s
                awaited = _awaited(seat, set(offered))
                for key in offered.values():  # as they come, while others are waited for
                    if key not in known and (data := objects.get(key)) is not None:
                        known[key] = _checked(seat.round, key, data, fits)
                if len(offered) >= rules.at_least and (is_late or not awaited):
                    found = [each for key in offered.values() if (each := known.get(key)) is not None]
                    mine = _seal(seat, own.theta, found)
                    if mine is not None:
                        sealed = held_after(objects, seal_key(seat.round), mine.as_bytes())
            if sealed is not None:
                seal = Seal.of(sealed)
                return seal, _read(objects, seal, known)
            problem = f"{len(offered)} of at least {rules.at_least} offers are there" + (
                f", and {', '.join(sorted(awaited))} is awaited" if awaited else ""
            )
        except StoreError as error:
            problem = str(error)
        if not seat.trains_alone and objects.now_s() - began_s > rules.wait_s:
            raise TransportError(f"round {seat.round} was not sealed in {rules.wait_s:.0f} s: {problem}")
        objects.pause(look_s)
        look_s = min(1.5 * look_s, LONGEST_LOOK_S)
    raise TransportError(f"this replica has left before round {seat.round} was sealed")


def _one_per_name(keys: Mapping[str, float]) -> dict[str, str]:
    """Keys of offers by the name of the member: of several processes with one name, the youngest's."""
    found: dict[str, tuple[int, str]] = {}
    for key, name, number in processes(keys):
        found[name] = max(found.get(name, (-1, "")), (number, key))
    return {name: found[name][1] for name in sorted(found)}


def _awaited(seat: Seat, offered: set[str]) -> set[str]:
    """Names of members that live, have begun, and will still offer to the present round.

    Raises `GradwireError` if a younger process has this member's name.
    """
    beats = seat.objects.list(MEMBERS)
    now = beats.get(member_key(seat.name, seat.number))
    awaited = set()
    for key, name, number in processes(beats):
        if name == seat.name and number > seat.number:
            raise GradwireError(
                f"another process has taken the name {name!r} of this replica: give each replica its own"
            )
        is_dead = now is not None and now - beats[key] > seat.rules.dead_s
        if is_dead or name in offered:
            continue
        beat = _beat(seat.objects, key)
        if beat is not None and _will_offer(beat, seat.round):
            awaited.add(name)
    return awaited


def _beat(objects: Objects, key: str) -> Beat | None:
    """A heartbeat; `None` if it is gone, or cannot be read, which is no matter of this member."""
    data = objects.get(key)
    try:
        return None if data is None else Beat.of(data)
    except WireError:
        return None


def _will_offer(beat: Beat, round_: int) -> bool:
    """Whether a member that lives is expected in a round. One that has begun in its middle is not."""
    return 0 <= beat.joined < max(round_, 1) and beat.passes < round_


def _checked(
    round_: int, key: str, data: bytes, fits: Callable[[Offer], bool]
) -> tuple[Offer, Counted] | None:
    """An offer to the present round that can be decoded; `None` if the `data` are no such."""
    try:
        offer = Offer.of(data)
    except WireError:
        return None
    if offer.round != round_ or not fits(offer):
        return None
    return offer, Counted(key, digest_of(data), offer.weight)


def _seal(seat: Seat, theta: str, found: Sequence[tuple[Offer, Counted]]) -> Seal | None:
    """A seal over the offers against the parameters that most members have. One without offers, if no
    parameters are those of most, or of enough members. `None` if the offers are too few, or this member has
    others than most.

    Raises `GradwireError` if parameters differ again after `MOST_IN_VAIN` such rounds in a row.
    """
    if len(found) < seat.rules.at_least:
        return None
    most, count = Counter(offer.theta for offer, _counted in found).most_common(1)[0]
    if count >= seat.rules.at_least and 2 * count > len(found):
        counted = tuple(each for offer, each in found if offer.theta == most)
        return Seal(seat.round, theta, seat.who, random_text(), counted) if most == theta else None
    if seat.in_vain >= MOST_IN_VAIN:
        raise _strays(seat.round)
    return Seal(seat.round, "", seat.who, random_text(), ())


# -- snapshots


def announce_snapshot(seat: Seat, seal: Seal) -> bool:
    """Say by a heartbeat that this member writes a snapshot, if it has sealed the last round, one is due, and
    no other member that lives writes one: one does it for all. Others read that before they seal the next
    round, unless they seal it without waiting for this member.

    Returns whether it has said so. Then `write_snapshot` has to follow. Raises `StoreError`.
    """
    if seal.by != seat.who:
        return False
    last = max((round_ for round_, _key in by_round(seat.objects.list(SNAPSHOTS))), default=0)
    if seat.round < last + seat.rules.snapshot_every or _another_writes(seat, last):
        return False
    seat.writes = seat.round
    try:
        seat.beat()
    except StoreError:
        seat.writes = -1
        raise
    return True


def _another_writes(seat: Seat, last: int) -> bool:
    """Whether a member that lives writes a snapshot, newer than the `last` one that is there."""
    beats, mine = seat.objects.list(MEMBERS), member_key(seat.name, seat.number)
    return any(
        beat.writes > last
        for key, _name, _number in processes(beats)
        if key != mine and beats.get(mine, 0.0) - beats[key] <= seat.rules.dead_s
        if (beat := _beat(seat.objects, key)) is not None
    )


def write_snapshot(seat: Seat, round_: int, data: bytes) -> None:
    """Write a snapshot of `round_`, and delete what nobody needs any more. Raises `StoreError`."""
    theta = new_theta(round_)
    try:
        seat.objects.upload(theta, data)
        pointer = Snapshot(round_, theta, digest_of(data))
        if not created(seat.objects, snapshot_key(round_), pointer.as_bytes()):
            seat.objects.delete([theta])
    finally:
        seat.writes = -1
    prune(seat)


def prune(seat: Seat) -> None:
    """Delete offers and shared states before the oldest one of those that are kept, or that somebody reads.

    Shared states are deleted by their own keys, so that one goes, too, whose writer died before it named it.
    One that sleeps there until others have pruned names a state that is gone, and nobody reads it: there are
    newer ones.
    """
    objects = seat.objects
    snapshots = by_round(objects.list(SNAPSHOTS))
    beats = objects.list(MEMBERS)
    now = beats.get(member_key(seat.name, seat.number))
    if len(snapshots) < KEPT or now is None:
        return
    floor = snapshots[-KEPT][0]
    youngest: dict[str, int] = {}
    for key, name, number in processes(beats):
        youngest[name] = max(youngest.get(name, -1), number)
        if now - beats[key] <= seat.rules.dead_s and (beat := _beat(objects, key)) is not None:
            floor = min(floor, beat.reads) if beat.reads >= 0 else floor
    objects.delete([key for key, name, number in processes(beats) if number < youngest[name]])
    for found in (snapshots, by_round(objects.list(THETAS)), by_round(objects.list(OFFERS))):
        objects.delete([key for round_, key in found if round_ < floor])
