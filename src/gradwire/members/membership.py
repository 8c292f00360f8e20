"""Part of one replica in rounds whose members come and go: groups, reducer, healing, events."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Store

from gradwire.checkpoint import state
from gradwire.checkpoint.state import Kept
from gradwire.checkpoint.validate import State
from gradwire.comm.apart import Apart, begin, within
from gradwire.comm.process_group import GroupPeers
from gradwire.errors import GradwireError, TransportError
from gradwire.measure.clock import now_s
from gradwire.measure.connections import Tried
from gradwire.members.base import Card, Entry, Event, Members, Roster
from gradwire.members.healing import describe, give, room_for, take
from gradwire.members.plan import RoundPlan
from gradwire.members.round import LOST, take_round
from gradwire.members.site import Site
from gradwire.members.steps import MovingSteps
from gradwire.sources.carried import give_up
from gradwire.step.reducer import Backward
from gradwire.step.worker import Worker

T = TypeVar("T")

_LOG = logging.getLogger("gradwire")

CONNECT_S = 10.0
"""Making a group takes so long at most: a member that is in the roster may be gone."""
LEAST_S, TIMES = 10.0, 3.0
"""Limits after which an exchange is given up: seconds, and a multiple of the longest recent exchange; the
larger one counts."""
LAST = 8
"""Number of recent rounds whose durations are remembered."""
TELL_S = 1.0
"""Between two words of the first rank to the others that it waits for an answer."""
PAUSE_S = 1.0
"""Between two questions without an answer, of a replica that trains meanwhile."""
PATIENCE_S = 5.0
"""A wait for a quorum is in the log after so long."""
FORMAT = "members 1"
"""Format of saved states."""


@dataclass(frozen=True)
class Running:
    """A reducer over the groups of a meeting, and its thread, which `stop` ends.

    Nothing here refers to the model: the thread refers to the membership, and has to end with the model.
    """

    backward: Backward
    worker: Worker
    stop: Callable[[], object]


class Membership:
    """This replica's side of each round: the `Participant` that `gradwire.members.round.take_round` drives.

    All ranks of a replica call its methods together. Only its first rank asks for rosters.
    """

    def __init__(
        self,
        asks: Asks,
        source: MovingSteps,
        site: Site,
        terms: Mapping[str, str],
        carry: Callable[[Sequence[int] | None], Running],
        *,
        timeout_s: float,
        every_s: float | None = None,
    ) -> None:
        """Build a membership that has not joined yet.

        Args:
            asks: finds the others. The model holds it.
            source: local steps of this replica.
            site: the ranks of this replica.
            terms: settings that all members must share.
            carry: makes a reducer for the source's present meeting, given the ranks that hold this replica
                alike.
            timeout_s: limit in seconds of healing, and of an exchange before durations are known.
            every_s: about the seconds from round to round; `None` counts steps.
        """
        self.events: list[Event] = []
        self.now: tuple[str, ...] = ()
        """Names of the members of the last roster."""
        self.committed = self.lost = 0
        """Number of rounds that have landed here; and of those given up, or whose Δ was dropped in
        healing."""
        self.running: Running | None = None
        self.listeners: list[weakref.ref[Callable[[], None]]] = []
        """Called when a round has landed. The model holds them: they are the user's."""
        self._source, self._carry, self._timeout_s = source, carry, timeout_s
        self._every_s = every_s
        self.site, self._held = site, weakref.ref(asks)
        self._name, self._address = asks.name, asks.address
        self._terms, self._born = (
            {**terms, "ranks per replica": str(self.site.size)},
            datetime.now().timestamp(),
        )
        self._run, self._rounds, self._number, self._tried, self._counted = "", -1, -1, -1, 0
        self._is_established = self._has_landed = False
        """True if a round has landed here since it started; and if the last one has."""
        self._store: TCPStore | None = None
        """Store at which others can meet: a new one for each meeting."""
        self._meeting: Apart | None = None
        self._joins = self._is_sound = self._is_running = False
        """True if no round was due here; if the meeting's groups still work; if a reducer runs over them."""
        self._memory: State | None = None
        self._kept: Kept = {}
        """State that exchanges kept in the last reducer, for the next one."""
        self._flying = -1
        """Number of a round that was sent and has not landed; below 0 for none."""
        self._start_s = 0.0
        self._took_s: deque[float] = deque(maxlen=LAST)
        self._ended_s = now_s()
        source.go(self.take_round, self.end_round, self.is_called)

    @property
    def rounds(self) -> int:
        """The rounds that have landed in the shared parameters."""
        return max(self._rounds, 0)

    @property
    def _asks(self) -> Asks:
        """Only for the thread that trains, which keeps the model alive, and with it the user's members."""
        asks = self._held()
        assert asks is not None, "asked by the user of the model"
        return asks

    # -- rounds

    def join(self) -> None:
        """Join the others: take part in their next round with the present parameters, or in none if none is
        due.

        Raises as `take_round` does.
        """
        self._joins = True
        self.take_round()

    def take_round(self) -> None:
        """Take part in a round that is due. Raises the errors that `optimizer.step()` is to raise."""
        self._start_s = now_s()
        self._pace()
        try:
            take_round(self._asks, self)
        except Alone:
            return
        finally:
            self._ended_s = now_s()
        self._joins = False

    def _pace(self) -> None:
        """Set the number of steps until the next round, from the last step times, if rounds go by time."""
        steps, took_s = self._source.made, self._start_s - self._ended_s
        if self._every_s is None or self._joins or not steps:
            return
        fit = max(1, round(steps * self._every_s / max(took_s, 1e-6)))
        self._source.due_after = self.site.numbers(fit)[0]

    def is_called(self) -> bool:
        """True if a quorum has come while this replica trained without one."""
        return self._asks.is_answered()

    def end_round(self) -> None:
        """Land the round that was sent before. If its exchange fails, it is given up, and the next round
        carries everything.
        """
        number, self._flying = self._flying, -1
        try:
            if self._vote(self._limit_s()):
                self.land(number)
        except LOST as error:
            self.lose(error)
            self.lost += 1
            self._tell("given up", self.now, why=str(error))
        except BaseException as error:
            self.lose(error)
            raise

    def card(self) -> Card:
        """Card of this replica, for the other members."""
        source, sums = self._source, ""
        if self._rounds >= 0:
            sums = ".".join(f"{each:08x}" for each in self.site.numbers(source.checksum()))
        if self._store is None and self.site.rank == 0:
            self._store = opened(self._address)
        return Card(
            terms=self._terms,
            address="" if self._store is None else f"{self._address}:{self._store.port}",
            run=self._run,
            rounds=self._rounds,
            number=self._number,
            counted=self._counted,
            tried=self._tried,
            checksum=sums,
            established=self._is_established,
            steps=source.rounds.steps,
            joins=self._joins,
            meeting=self._meeting.name if self._meeting is not None and self._is_sound else "",
            connections=source.links.connections if source.links is not None else 0,
            round_trip_s=source.links.round_trip_s if source.links is not None else 0.0,
            born=self._born,
        )

    def meet(self, plan: RoundPlan) -> None:
        """Let go of the last meeting, and connect with the members of this one."""
        start_s = now_s()
        self._leave_meeting()
        failure: BaseException | None = None
        try:
            self._meeting = self._met(plan)
            connections, trip_s = plan.links
            self._source.links = Tried(trip_s, 0, {}, connections) if connections else None
        except BaseException as error:
            failure = error
        self.site.agree(failure)
        assert self._meeting is not None, "or there is a failure"
        self._is_sound = True
        self._source.meet(self._meeting)
        self._note_roster(plan, now_s() - start_s)

    def _met(self, plan: RoundPlan) -> Apart:
        with ExitStack() as held:
            # A member that dies now closes its end: the others need not wait until `CONNECT_S` is over.
            begun = [
                begin(partial(_connected, *each)) for each in zip(plan.names, plan.addresses, strict=True)
            ]
            for each in begun:  # also those that connect after one has failed
                held.callback(each.add_done_callback, _close)
            ends = [each.result() for each in begun]
            return self._apart(plan, lambda: any(map(_is_closed, ends)))

    def _apart(self, plan: RoundPlan, lost: Callable[[], bool]) -> Apart:
        host, _, port = plan.addresses[0].rpartition(":")
        size, place = self.site.size, plan.names.index(self._name)
        store: Store | None = None
        if place == 0:
            store, self._store = self._store, None
        if store is None:
            store = within(
                CONNECT_S,
                lambda: TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_S)),
                f"{plan.names[0]} cannot be reached at {plan.addresses[0]}",
            )
        return Apart(
            store,
            plan.meeting,
            place * size + self.site.rank,
            len(plan.names) * size,
            address=self._address,
            connect_s=CONNECT_S,
            timeout_s=self._timeout_s,
            lost=lost,
        )

    def _leave_meeting(self) -> None:
        """End the reducer and the groups of the last meeting; this rank's memory is kept."""
        if self._is_running:
            self._memory, self._is_running = self._remembered(), False
            self._kept = self._memory["kept"]
            self._stop()
            give_up(self._source.carrier)
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None

    def _stop(self) -> None:
        assert self.running is not None
        self.running.stop()

    def _remembered(self) -> State:
        assert self.running is not None
        backward = self.running.backward
        if self._is_sound:
            backward.up_to_date()
        return backward.call(lambda: state.own(backward.reducer))

    def heal(self, plan: RoundPlan) -> None:
        """Give or take the shared parameters, as `plan` says. Other members wait in the exchange."""
        start_s, name = now_s(), self._name
        found, moved = self._together(self._timeout_s, lambda: self._moved(plan))
        if name in plan.heals:
            if self._rounds >= 0:
                self._tell_loss(plan)
            self._take_up(found)
        self._run = plan.run
        if plan.begins:
            self._rounds = 0
        if not plan.begins and (name in plan.heals or name == plan.source):
            self._tell("healed", plan.heals, now_s() - start_s, moved)

    def _moved(self, plan: RoundPlan) -> tuple[Any, int]:
        """Receive or send the state of healing. Returns (state received, bytes sent or received)."""
        assert self._meeting is not None, "met before"
        source, site, moved = self._source, self.site, 0
        peers = GroupPeers([self._meeting.group])
        if self._name == plan.source:
            given = {"kept": self._kept, "at": [self._rounds, self._number, self._counted]}
            # Ranks that hold a replica alike get the rest once, by their first one.
            is_sharded = source.local.shards is not None
            shared = source.shared_state() if is_sharded or site.rank == 0 else {}
            for each in plan.heals:
                moved += give(peers, plan.names.index(each) * site.size + site.rank, given | shared)
        if self._name in plan.heals:
            return take(peers, plan.names.index(plan.source) * site.size + site.rank)
        return None, moved

    def _take_up(self, found: Any) -> None:
        """Continue from a received state; this rank's own progress and memory are dropped."""
        source, site = self._source, self.site
        if source.local.shards is None and site.size > 1:
            text, tensors = describe({name: each for name, each in found.items() if name != "kept"})
            shared, room = room_for(site.told(text))
            for own, each in zip(room, tensors, strict=site.rank == 0):
                own.copy_(each)
            site.spread(room)
            found |= shared
        try:
            source.take_shared(found)
            self._rounds, self._number, self._counted = found["at"]
            self._memory, self._kept, self._flying = None, found["kept"], -1
        except (KeyError, TypeError, ValueError) as error:
            raise GradwireError(f"the shared parameters of the others do not fit here: {error}") from error

    def be_ready(self, plan: RoundPlan) -> None:
        """Make a reducer over the groups of this meeting; it sends nothing yet."""
        self._run = plan.run
        self._together(self._timeout_s, self._run_reducer)

    def exchange(self, plan: RoundPlan) -> bool:
        """Send Δ, and wait for the vote, unless it is to land later."""
        self._tried, self._run = plan.number, plan.run

        def send() -> None:
            self._run_reducer()
            if self._flying >= 0:  # from a save
                self.land(self._flying) if self._source.rounds.receive()[0] else None
            self._source.rounds.send()

        self._together(self._timeout_s, send)
        if self._source.delay:
            self._flying = plan.number
            return False
        # Those who heal come later than the others.
        return self._vote(self._timeout_s if plan.heals else self._limit_s())

    def _run_reducer(self) -> None:
        """Build a reducer over the groups of this meeting, with the old state, unless one runs already."""
        if not self._is_running:
            before, self.running = self.running, self._carry(self._source.grid.machine)
            self._is_running = True
            self._go_on(before)
            del before
            gc.collect()  # a reducer is full of cycles, and holds groups, with their sockets and threads
            return_freed()

    def _go_on(self, before: Running | None) -> None:
        assert self.running is not None
        backward, memory, kept = self.running.backward, self._memory, self._kept
        if before is not None:
            former = before.backward
            backward.overlap, backward.reducer.health = former.overlap, former.reducer.health
            backward.history.go_on(former.history)
        backward.call(lambda: state.go_on(backward.reducer, memory, kept, max(self._rounds, 0)))
        self._memory = None

    def _limit_s(self) -> float:
        """The time that an exchange may take."""
        return max(LEAST_S, TIMES * max(self._took_s)) if self._took_s else self._timeout_s

    def _vote(self, limit_s: float) -> bool:
        """Wait for the status vote of all ranks; whether something lands."""
        try:
            lands, _all_finished = self._together(limit_s, self._source.rounds.receive)
        except BaseException:
            self._source.rounds.drop()
            raise
        return lands

    def _together(self, limit_s: float, function: Callable[[], T]) -> T:
        """Call `function` on all ranks of this replica, in `limit_s` seconds at most. All raise if one
        does.
        """
        assert self._meeting is not None, "met before"
        failure: BaseException | None = None
        try:
            with _Deadline(limit_s, self._meeting.abort):
                found = function()
        except LOST as error:
            failure = error
        except BaseException as error:  # others wait for this rank
            self._meeting.abort()
            failure = error
        self.site.agree(failure)
        return found

    def land(self, number: int) -> None:
        """Step the shared parameters, and go on from them."""
        self._source.rounds.step()
        self._rounds, self._number = self._rounds + 1, number
        self._counted += self._source.rounds.counted
        self._is_established = self._has_landed = True
        self.committed += 1
        self._took_s.append(now_s() - self._start_s)
        for each in self.listeners:
            if (listener := each()) is not None:
                listener()

    def lose(self, error: BaseException) -> None:
        """Abort all groups at once, so that members that are no neighbours of the dead one notice, too."""
        self._is_sound = self._has_landed = False
        if self._meeting is not None:
            self._meeting.abort()
        self._tell("failed", self.now, now_s() - self._start_s, why=str(error))

    def close(self) -> None:
        """Leave the others. Idempotent; the model may be gone."""
        if self._is_running:
            self._is_running = False
            self._stop()
        if self._meeting is not None:
            self._meeting.close()
        self._meeting = self._store = None
        if (asks := self._held()) is not None:  # or it leaves by itself
            asks.close()

    # -- saves

    def save(self) -> dict[str, Any]:
        """This rank's state. Waits for a round in flight, which does not land by that."""
        if self._is_sound:
            assert self.running is not None, "asked between rounds"
            assert self._meeting is not None, "which is sound"
            with _Deadline(self._timeout_s, self._meeting.abort):
                self.running.backward.settle()
        return {
            "format": FORMAT,
            "model": self._terms["model"],
            "ranks": self.site.size,
            "counts": [self._rounds, self._number, self._tried, self._flying],
            "counted": self._counted,
            "run": self._run,
            "engine": self._remembered() if self._is_running else self._memory,
            "source": deepcopy(self._source.state.save()),
        }

    def load(self, saved: Any) -> None:
        """Continue from a state that `save` returned, before this replica joins. Raises `ValueError` if it is
        of another model.
        """
        told = saved if isinstance(saved, dict) else {}
        if told.get("format") != FORMAT or told["model"] != self._terms["model"]:
            raise ValueError("this is not a save of this model with members=")
        self._rounds, self._number, self._tried, self._flying = told["counts"]
        self._run, self._memory, self._counted = told["run"], told["engine"], told.get("counted", 0)
        self._kept = {} if self._memory is None else self._memory["kept"]
        _text, apply = self._source.state.prepared(told["source"], own=True)
        apply()

    # -- telling

    def _note_roster(self, plan: RoundPlan, seconds: float) -> None:
        joined = tuple(name for name in plan.names if name not in self.now)
        left = tuple(name for name in self.now if name not in plan.names)
        self.now = plan.names
        if joined:
            self._tell("joined", joined, seconds)
        if left:
            self._tell("left", left, seconds)

    def _tell_loss(self, plan: RoundPlan) -> None:
        """Count and say what this replica loses as it is healed."""
        source, apart_s = self._source, self._start_s - self._ended_s
        self.lost += source.rounds.steps > 0
        if self._run and self._run != plan.run:
            _LOG.warning(
                "%s: another run counts more steps than this replica's, of %d rounds, which gives way to it",
                self._name,
                self._rounds,
            )
        elif self._has_landed:
            _LOG.warning(
                "%s: the others have had rounds without this replica, which asked %.1f s after its last one: "
                "%d steps are lost. Unless it was stopped or cut off, the grace of a roster is shorter than "
                "the time between rounds: start the lighthouse with a longer --grace",
                self._name,
                apart_s,
                source.rounds.steps,
            )

    def _tell(
        self, what: str, who: tuple[str, ...], seconds: float = 0.0, sent: int = 0, why: str = ""
    ) -> None:
        event = Event(what, max(self._rounds, 0), who, seconds, sent, why, datetime.now().timestamp())
        self.events.append(event)
        if self.site.rank == 0:
            _LOG.info("%s: %s", self._name, event)


def return_freed() -> None:
    """Return freed memory to the system, where the C library is glibc.

    It keeps freed memory for each of its arenas apart, and threads of each new reducer get other arenas.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


class _Deadline:
    """Context with a time limit: afterwards, `end` is called on another thread to break off what runs."""

    def __init__(self, limit_s: float, end: Callable[[], None]) -> None:
        self._timer = threading.Timer(limit_s, end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()  # it may just be ending what runs; nothing new may begin meanwhile


class Alone(Exception):
    """Signal that there is no quorum yet, and this replica shall train meanwhile."""


class Asks:
    """`Members` for all ranks of a replica: the first one asks, and tells the others.

    It asks on a thread of its own, and tells the others every second that it still waits: so Python hears
    signals on all ranks, and no wait is longer than the limit of the replica's own group.

    The model holds it, and nothing else for long: members are the user's, and may refer to the model.
    """

    def __init__(self, members: Members, site: Site) -> None:
        self._members, self._site = members, site
        self.name, self.address, self.alone_s = members.name, members.address, members.alone_s
        self.id = site.told(members.id)
        self._asked: Future[Roster] | None = None
        """Answer to a question that has none yet; on the first rank alone."""
        self._trains = False
        """True if local steps go on without an answer; on all ranks."""
        self._has_left = threading.Event()

    def ask(self, card: Card) -> Roster:
        """As `Members.ask`. Raises `Alone`, on all ranks, if local steps shall go on without an answer."""
        is_patient = self.alone_s is None or card.joins
        until_s = now_s() + (0.0 if self._trains or self.alone_s is None else self.alone_s)
        outcome, text = "waits", ""
        while outcome == "waits":
            if self._site.rank == 0:
                outcome, text = self._heard(card, None if is_patient else until_s)
            outcome, text = json.loads(self._site.told(json.dumps([outcome, text])))
        self._trains = outcome == "trains"
        if outcome == "trains":
            raise Alone
        if outcome == "failed":
            raise TransportError(text)
        moment, rows = json.loads(text)
        entries = [Entry(name, id_, None if told is None else Card.of(told)) for name, id_, told in rows]
        return Roster(moment, tuple(entries))

    def _heard(self, card: Card, until_s: float | None) -> tuple[str, str]:
        """Wait for the answer, for a second at most. Returns ("roster", its text), ("failed", why), that it
        "waits", or, from the time `until_s` on, that it "trains" meanwhile.
        """
        left_s = TELL_S if until_s is None else min(TELL_S, max(until_s - now_s(), 0.0))
        if self._asked is None:
            self._asked = Future[Roster]()
            asking = partial(
                _ask_on, weakref.ref(self), card, self._asked, self.name, self._has_left, until_s is None
            )
            threading.Thread(target=asking, name="gradwire asks", daemon=True).start()
        if not wait([self._asked], left_s).done:
            return "waits" if until_s is None or now_s() < until_s else "trains", ""
        asked, self._asked = self._asked, None
        try:
            roster = asked.result()
        except Exception as error:
            return "failed", str(error)
        rows = [[e.name, e.id, None if e.card is None else e.card.as_dict()] for e in roster.entries]
        return "roster", json.dumps([roster.moment, rows])

    def tried(self, card: Card) -> Roster:
        """Ask the members themselves, on the thread of the question."""
        return self._members.ask(card)

    def is_answered(self) -> bool:
        """True if a question asked while training has an answer. Called by all ranks together."""
        return self._trains and bool(self._site.numbers(self._asked is not None and self._asked.done())[0])

    def close(self) -> None:
        """See `Members.close`. A question that goes on beside training is asked no more."""
        if not self._has_left.is_set():
            self._has_left.set()
            self._members.close()


class Leaving:
    """Calls `leave` when it goes itself, with the model that holds it.

    A weak reference to members that refer to the model is gone before the model's own finalizers run.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave

    def __del__(self) -> None:
        self._leave()


def _ask_on(
    held: weakref.ref[Asks],
    card: Card,
    asked: Future[Roster],
    name: str,
    has_left: threading.Event,
    once: bool,
) -> None:
    """Ask until there is an answer, or until nobody holds the one who asks.

    Args:
        held: asks, and is held here only while it does.
        card: of the replica.
        asked: gets the answer.
        name: of the replica.
        has_left: set when the replica leaves.
        once: whether an error is an answer. Otherwise it asks again, beside training.
    """
    what = "this replica waits for other members" if once else "local steps go on meanwhile"
    last = ""
    with _said(name, has_left, f"no quorum yet: {what}"):
        while (asks := held()) is not None and not has_left.is_set():
            try:
                asked.set_result(asks.tried(card))
                return
            except Exception as error:
                if once or not isinstance(error, TransportError):
                    asked.set_exception(error)
                    return
                if str(error) != last:
                    last = str(error)
                    _LOG.info("%s: no quorum: %s", name, last)
            del asks
            has_left.wait(PAUSE_S)


@contextmanager
def _said(name: str, has_left: threading.Event, what: str) -> Iterator[None]:
    """Log `what` after a few seconds, and the length of a wait that an answer ended. Nothing if it was
    short.
    """
    start_s, waits = now_s(), threading.Timer(PATIENCE_S, _LOG.info, ("%s: %s", name, what))
    waits.daemon = True
    waits.start()
    try:
        yield
    finally:
        waits.cancel()
    if not has_left.is_set() and (waited_s := now_s() - start_s) >= PATIENCE_S:
        _LOG.info("%s: the wait for a quorum has ended after %.0f s", name, waited_s)


def _connected(name: str, address: str) -> socket.socket:
    """Connection with the store of a member. Raises `TransportError` if nothing listens at `address`, or does
    not answer in `CONNECT_S` seconds.
    """
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host, int(port)), CONNECT_S)
    except OSError as error:
        raise TransportError(f"members cannot meet: {name} is not there, at {address}: {error}") from error


def _close(connecting: Future[socket.socket]) -> None:
    """Close a connection with a store, unless it could not be made."""
    if connecting.exception() is None:
        connecting.result().close()


def _is_closed(connection: socket.socket) -> bool:
    """True if the other side has closed a connection over which it sends nothing."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def opened(address: str) -> TCPStore:
    """Open a store that listens at `address` alone. Raises `ValueError` if this machine has no such
    address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise ValueError(f"{address} is no address of this machine at which others meet: {error}") from error
    port = listening.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_S),
        master_listen_fd=listening.detach(),
    )
