"""A replica's part in a run over an object store: heartbeats, waits beside training, snapshots, events."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import Any

from gradwire.comm.apart import begin
from gradwire.errors import GradwireError, TransportError
from gradwire.measure.clock import now_s
from gradwire.members.base import Event
from gradwire.members.bucket.all_ranks import AllRanks
from gradwire.members.bucket.objects import PIECE, Objects, StoreError
from gradwire.members.bucket.records import Offer, Seal
from gradwire.members.bucket.rounds import (
    LONGEST_LOOK_S,
    NO_MORE,
    Rules,
    Seat,
    announce_snapshot,
    enter,
    land,
    patiently,
    send,
    settle,
    write_snapshot,
)
from gradwire.members.bucket.steps import StoredSteps
from gradwire.members.site import Site
from gradwire.sources.carried import claim

_LOG = logging.getLogger("gradwire")

SLICE_S = 0.5
"""The thread of rounds waits in pieces of this length, so that it hears when training was interrupted."""
SHARE = 0.1
"""Of the link, which a snapshot may take."""
FAREWELL_S = 10.0
"""The last heartbeat is waited for so long."""
FORMAT = "store 1"
"""Format of saved states."""


class Metered:
    """`Objects` that counts requests and bytes, of all threads of a member."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.sent_bytes = self.received_bytes = 0
        self.requests: dict[str, int] = dict.fromkeys(("put", "get", "list", "delete"), 0)
        self.pause, self.now_s = objects.pause, objects.now_s
        self._counts = threading.Lock()
        self._bytes_per_s = 0.0
        """The highest rate at which an object was created."""

    def _count(self, request: str, number: int = 1, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        with self._counts:
            self.requests[request] += number
            self.sent_bytes += sent_bytes
            self.received_bytes += received_bytes

    def create(self, key: str, data: bytes) -> bool:
        """See `Objects.create`."""
        self._count("put", sent_bytes=len(data))
        start_s = now_s()
        is_new = self._objects.create(key, data)
        self._bytes_per_s = max(self._bytes_per_s, len(data) / max(now_s() - start_s, 1e-9))
        return is_new

    def upload(self, key: str, data: bytes, bytes_per_s: float = math.inf) -> None:
        """See `Objects.upload`; at most at a tenth of the rate at which offers were created."""
        pieces = -(-len(data) // PIECE)
        self._count("put", pieces + 2 if pieces > 1 else 1, sent_bytes=len(data))
        self._objects.upload(key, data, min(bytes_per_s, SHARE * self._bytes_per_s))

    def put(self, key: str, data: bytes) -> None:
        """See `Objects.put`."""
        self._count("put", sent_bytes=len(data))
        self._objects.put(key, data)

    def get(self, key: str) -> bytes | None:
        """See `Objects.get`."""
        found = self._objects.get(key)
        self._count("get", received_bytes=len(found or b""))
        return found

    def list(self, prefix: str) -> dict[str, float]:
        """See `Objects.list`."""
        self._count("list")
        return self._objects.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        """See `Objects.delete`."""
        self._count("delete", len(keys))
        self._objects.delete(keys)


class _Events:
    """Events so far. Refers to no model, so that threads may hold it."""

    def __init__(self, name: str) -> None:
        self.name, self.all, self.seat = name, list[Event](), None
        self.rounds: Callable[[], int] = lambda: 0

    def tell(self, what: str, who: tuple[str, ...], why: str, seconds: float = 0.0) -> None:
        event = Event(what, max(self.rounds(), 0), who, seconds, 0, why, datetime.now().timestamp())
        self.all.append(event)
        _LOG.info("%s: %s", self.name, event)


@dataclass(frozen=True)
class Place:
    """Where a replica stands in the run, as all of its ranks know it."""

    run: str = ""
    round: int = 0
    waits_since: int = -1
    names: tuple[str, ...] = ()
    committed: int = 0
    lost: int = 0
    waited_s: float = 0.0
    is_under_way: bool = False
    """Whether a seal is awaited."""


class StoredMembership:
    """This replica's side of each round. All of its ranks call the methods together, from the thread that
    trains. Rounds run on a thread of the first rank (`AllRanks`), which alone has a seat in the run.
    """

    running = None
    """There is no reducer."""

    def __init__(
        self,
        objects: Objects,
        source: StoredSteps,
        site: Site,
        rules: Rules,
        *,
        alone_s: float | None,
        every_s: float | None,
    ) -> None:
        """Prepare to join.

        Args:
            objects: the store.
            source: local steps of this replica.
            site: its ranks.
            rules: of rounds.
            alone_s: seconds without a seal after which local steps go on until there is one; `None` waits.
            every_s: about the seconds from round to round; `None` counts steps.
        """
        self.store, self.site = Metered(objects), site
        self._source, self._rules = source, rules
        self._alone_s, self._every_s = alone_s, every_s
        self._told = _Events(source.name)
        self._spread = 0
        """Events of which all ranks know."""
        self._place = Place()
        self._seat: Seat | None = None
        """On the first rank alone."""
        self._saved: tuple[str, int, int] | None = None
        self._settling: Future[tuple[Seal, list[Offer] | None]] | None = None
        """The wait for a seal, beside training."""
        self._snapshot: Future[None] | None = None
        self._stops = threading.Event()
        self._said = ""
        """Last word about a store that does not answer."""
        self._committed, self._waited_s = 0, 0.0
        self.listeners: list[weakref.ref[Callable[[], None]]] = []
        """Called when a round has landed. The model holds them: they are the user's."""
        self._ended_s = now_s()
        self._ranks = AllRanks(source, self._tells, self._hears, self._call_listeners)
        source.check_alone()
        source.dropped = self._note_loss
        source.go(self.take_round, self.end_round, self.is_called)

    @property
    def seat(self) -> Seat:
        assert self._seat is not None, "asked on the first rank, after it has joined"
        return self._seat

    @property
    def events(self) -> list[Event]:
        """Events so far, oldest first."""
        return self._told.all

    @property
    def now(self) -> tuple[str, ...]:
        """Names of the members of the last round."""
        return self._place.names

    @property
    def rounds(self) -> int:
        """The rounds that have landed in the shared parameters."""
        return max(self._place.round, 0)

    @property
    def committed(self) -> int:
        """Rounds that have landed here."""
        return self._place.committed

    @property
    def lost(self) -> int:
        """Times that Δ was dropped."""
        return self._place.lost

    @property
    def waited_s(self) -> float:
        """Seconds for which training has waited for seals."""
        return self._place.waited_s

    def note_loss(self, loss: float) -> None:
        """Tell the others the first rank's last loss, by heartbeats."""
        if self._seat is not None:
            self._seat.loss = loss

    # -- what all ranks know

    def _tells(self) -> dict[str, Any]:
        place, seat = self._place, self._seat
        if seat is not None:
            place = Place(
                seat.run,
                seat.round,
                seat.waits_since,
                seat.names,
                self._committed,
                seat.lost,
                self._waited_s,
                self._settling is not None,
            )
        fresh, self._spread = self.events[self._spread :], len(self.events)
        return {"place": asdict(place), "events": [asdict(each) for each in fresh]}

    def _hears(self, told: Mapping[str, Any]) -> None:
        self._place = Place(**{**told["place"], "names": tuple(told["place"]["names"])})
        if self.site.rank:
            self.events.extend(Event(**{**each, "who": tuple(each["who"])}) for each in told["events"])

    def _call_listeners(self) -> None:
        for each in self.listeners:
            if (listener := each()) is not None:
                listener()

    # -- rounds

    def join(self, terms: Mapping[str, str]) -> None:
        """Enter the run, or begin it. All members have the same `terms`.

        Raises `GradwireError` and `StoreError`.
        """
        self._ranks.run(partial(self._enter, terms))
        claim(self._source.carrier)

    def _enter(self, terms: Mapping[str, str]) -> None:
        enter(
            self.store,
            self._source.name,
            terms,
            self._ranks,
            self._rules,
            self._saved,
            tell=self._told.tell,
            seated=self._begin_beats,
        )
        held = weakref.WeakMethod(self._note_landing)  # the thread of heartbeats holds the seat
        self.seat.landed = lambda before: _called(held, before)

    def _begin_beats(self, seat: Seat) -> None:
        self._seat = seat
        seat.trains_alone = self._alone_s is not None
        self._told.rounds = lambda: seat.round
        beats = threading.Thread(target=_beat, args=(seat, self._stops), daemon=True)
        beats.name = "gradwire heartbeat"
        beats.start()

    def take_round(self) -> None:
        """Take part in a round that is due. Raises the errors that `optimizer.step()` is to raise."""
        try:
            with self._waited_for():
                self._pace()
                self._ranks.run(self._take_round)
        finally:
            self._ended_s = now_s()

    @contextmanager
    def _waited_for(self) -> Iterator[None]:
        """A site that fails within it lives, but the others do not wait for it until it offers again: its
        program may have caught the error, and do something else.
        """
        try:
            yield
        except BaseException:
            if self._seat is not None:
                self._seat.passes = NO_MORE
            raise

    def _take_round(self) -> None:
        seat, source = self.seat, self._source
        seat.step = source.attempts.count
        try:
            if self._settling is not None:
                if not self._settling.done():
                    return  # local steps go on, as they did after `alone_s`
                self._land()
            if send(seat, self._ranks):
                stops, size = self._stops, source.payload_bytes(seat.round)  # its thread holds no model
                self._settling = begin(
                    partial(
                        settle, seat, lambda: not stops.is_set(), lambda offer: len(offer.payload) == size
                    )
                )
                if source.delay:
                    self._ranks.land_at(source.attempts.count + source.delay)
                else:
                    self._land()
        except StoreError as error:
            self._go_on_after(error)

    def _go_on_after(self, error: StoreError) -> None:
        """Raise `error`, unless local steps go on without the store."""
        if self._alone_s is None:
            raise error
        if (why := f"{error}: local steps go on meanwhile") != self._said:
            self._said = why
            self._told.tell("alone", self.seat.names, why)

    def _pace(self) -> None:
        """Set the number of steps until the next round, from the last step times of the first rank, if rounds
        go by time.
        """
        steps, took_s = self._source.made, now_s() - self._ended_s
        if self._every_s is not None and steps:
            fit = max(1, round(steps * self._every_s / max(took_s, 1e-6)))
            self._source.due_after = self.site.numbers(fit)[0]

    def is_called(self) -> bool:
        """True if the seal of an earlier offer has come while this replica trained without it."""
        waits_no_longer = self._place.is_under_way and self._source.rounds.round.lands_at is None
        if self._alone_s is None or not waits_no_longer:
            return False
        with self._waited_for():
            return bool(self.site.numbers(self._settling is not None and self._settling.done())[0])

    def end_round(self) -> None:
        """Wait for the seal of this replica's offer, and land it, unless local steps shall go on without it.

        Raises `TransportError` after `Rules.wait_s`.
        """
        with self._waited_for():
            self._ranks.run(self._land)

    def _land(self) -> None:
        assert self._settling is not None, "sent before"
        before_s = now_s()
        while not self._settling.done():
            self._ranks.require_running()
            waited_s = now_s() - before_s
            if self._alone_s is not None and waited_s >= self._alone_s:
                self._told.tell(
                    "alone", self.seat.names, "no seal yet: local steps go on meanwhile", waited_s
                )
                self._ranks.land_at(None)
                return
            try:
                self._settling.exception(SLICE_S)
            except NotYet:
                continue
        self._waited_s += now_s() - before_s
        settling, self._settling = self._settling, None
        self._ranks.land_at(None)
        seal, offers = settling.result()
        try:
            patiently(self.seat, lambda: land(self.seat, self._ranks, seal, offers))
        except StoreError as error:  # the round is landed when the next one is due
            self._go_on_after(error)
            return
        self._said = ""
        self._keep_snapshot(seal)

    def _note_loss(self, why: str) -> None:
        if self._seat is not None:
            self._seat.lost += 1
            self._told.tell("dropped", (self._seat.name,), why)

    def _note_landing(self, before: tuple[str, ...]) -> None:
        self._committed += 1
        now = self.seat.names
        joined = tuple(name for name in now if name not in before)
        left = tuple(name for name in before if name not in now)
        if joined:
            self._told.tell("joined", joined, "")
        if left:
            self._told.tell("left", left, "")
        self._ranks.landed()

    def _keep_snapshot(self, seal: Seal) -> None:
        """Write a snapshot beside training, if it is this member's turn and its last one is written."""
        if self._snapshot is not None and not self._snapshot.done():
            return
        try:
            if announce_snapshot(self.seat, seal):
                write = partial(write_snapshot, self.seat, self.seat.round, self._ranks.give())
                self._snapshot = begin(partial(_said, self._told, write))
        except StoreError as error:
            self._told.tell("failed", (self._source.name,), f"no snapshot: {error}")

    def land_last(self) -> None:
        """Land the round that is under way, before this replica leaves. It waits no longer than for the
        others' offers: a round that needs more members is left to them.
        """
        patience_s = self._rules.patience_s + LONGEST_LOOK_S
        self._alone_s = patience_s if self._alone_s is None else min(self._alone_s, patience_s)
        if self._seat is not None:
            self._seat.trains_alone = True
        self._source.note_changes()
        if self._place.is_under_way:  # also if local steps went on after `alone_s`
            self.end_round()

    def close(self) -> None:
        """Leave the others. Idempotent; the model may be gone.

        It waits for no snapshot: one that is not finished when the process ends is none, and the one before
        it counts.
        """
        if self._stops.is_set():
            return
        self._stops.set()
        if self._seat is not None:
            try:
                begin(self._seat.leave).result(FAREWELL_S)
            except (StoreError, NotYet, RuntimeError) as error:  # no thread begins while the interpreter ends
                _LOG.info("%s: others hear of its end by its heartbeats: %s", self._seat.name, error)

    # -- saves

    def save(self) -> dict[str, Any]:
        """This replica's state. An offer that is not sealed yet is not part of it."""
        place = self._place
        return {
            "format": FORMAT,
            "place": [place.run, place.round, place.waits_since],
            "source": self._source.save(),
        }

    def load(self, saved: Any) -> None:
        """Continue from a state that `save` returned, before this replica joins. Raises `ValueError`."""
        told = saved if isinstance(saved, dict) else {}
        if told.get("format") != FORMAT:
            raise ValueError("this is not a save of this model with members=gradwire.members.store(…)")
        self._source.prepared_save(told["source"])()
        run, round_, waits_since = told["place"]
        self._saved = run, round_, waits_since


def _called(held: weakref.WeakMethod[Any], before: tuple[str, ...]) -> None:
    if (method := held()) is not None:
        method(before)


def _said(told: _Events, write: Callable[[], None]) -> None:
    """Call `write`. An error is told: another member writes the next snapshot."""
    try:
        write()
    except (GradwireError, TransportError) as error:
        told.tell("failed", (told.name,), f"no snapshot: {error}")


def _beat(seat: Seat, stops: threading.Event) -> None:
    """Write heartbeats until the replica leaves."""
    said = ""
    while not stops.wait(seat.rules.beat_s):
        try:
            seat.beat()
        except StoreError as error:
            if str(error) != said:
                said = str(error)
                _LOG.info("%s: no heartbeat: %s", seat.name, said)
