"""Members over an object store, by a script: they die at each request, and answers come late, twice or never.

Each process of a play is a thread that runs the real rounds, on a replica whose parameters are sets of things
learned. It stops at each request to the store and at each pause. When all have stopped, a drawn one goes on,
or something happens to it. So a schedule is a seed, and time passes only in the play.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradwire.errors import GradwireError, TransportError
from gradwire.members.bucket.objects import StoreError
from gradwire.members.bucket.records import Beat, Offer, Seal, member_key, seal_key
from gradwire.members.bucket.rounds import (
    Rules,
    Seat,
    announce_snapshot,
    catch_up,
    enter,
    land,
    patiently,
    send,
    settle,
    write_snapshot,
)

MOST = 200_000
"""Requests of a play: far more than any needs."""
STEP_S = 0.02
"""Seconds that a request takes."""


class Killed(BaseException):
    """The process is no more."""


class Memory:
    """`Objects` in memory, with a clock that is moved by hand. What any store must do at once, it does."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.time_s = 1000.0

    def create(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return False
        self.put(key, data)
        return True

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data, float(int(self.time_s))

    def upload(self, key: str, data: bytes, bytes_per_s: float = math.inf) -> None:
        self.put(key, data)

    def get(self, key: str) -> bytes | None:
        return self.objects[key][0] if key in self.objects else None

    def list(self, prefix: str) -> dict[str, float]:
        return {
            key: at for key, (_, at) in self.objects.items() if not prefix or key.startswith(f"{prefix}/")
        }

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def pause(self, seconds: float) -> None:
        self.time_s += seconds

    def now_s(self) -> float:
        return self.time_s


@dataclass
class Save:
    """What a process finds on its disk."""

    place: tuple[str, int, int]
    shared: frozenset[str]
    held: frozenset[str]


@dataclass
class Process:
    """A start of a member."""

    play: Play
    name: str
    number: int
    saved: Save | None
    offset_s: float = 0.0
    """How wrong its clock is."""
    seat: Seat | None = None
    is_alive: bool = True
    wakes_s: float = 0.0
    beat_s: float = 0.0
    what: str = ""
    go: threading.Event = field(default_factory=threading.Event)
    answer: BaseException | None = None
    does: bool = True

    @property
    def id(self) -> str:
        return f"{self.name}#{self.number}"

    def stop(self, what: str, wakes_s: float = 0.0) -> None:
        """Stop here until the play goes on."""
        with self.play.lock:
            self.what, self.wakes_s = what, wakes_s
            self.play.running -= 1
            self.play.all_stopped.notify()
        self.go.wait()
        self.go.clear()

    # -- as `Objects`, over the play's store

    def _ask(self, what: str, do: Callable[[], Any], stale: Any = None) -> Any:
        self.stop(what)
        fault, self.answer = self.answer, None
        if isinstance(fault, Killed):
            if self.play.draw.random() < 0.5:
                do()  # it died before it heard
            raise fault
        if fault is None:
            return do()
        if str(fault) == "stale" and stale is not None:
            return stale()
        if str(fault) == "answer lost":
            do()
        if str(fault) == "late":
            self.play.late.append(do)
        raise StoreError(str(fault))

    def create(self, key: str, data: bytes) -> bool:
        return bool(self._ask("create " + key.partition("/")[0], partial(self.play.store.create, key, data)))

    def put(self, key: str, data: bytes) -> None:
        self._ask("put " + key.partition("/")[0], partial(self.play.store.put, key, data))

    def upload(self, key: str, data: bytes, bytes_per_s: float = math.inf) -> None:
        self.put(key, data)

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._ask("get " + key.partition("/")[0], partial(self.play.store.get, key))
        return found

    def list(self, prefix: str) -> dict[str, float]:
        store = self.play.store
        before = store.list(prefix)
        found: dict[str, float] = self._ask(
            "list " + prefix.partition("/")[0], partial(store.list, prefix), lambda: before
        )
        return found

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._ask("delete " + key.partition("/")[0], partial(self.play.store.delete, [key]))

    def pause(self, seconds: float) -> None:
        self.stop("pause", self.play.store.time_s + seconds)
        if isinstance(self.answer, Killed):
            raise self.answer
        self.answer = None

    def now_s(self) -> float:
        return self.play.store.time_s + self.offset_s


class Learner:
    """A replica whose parameters are sets of texts; a drawn part of what it has learned is sent."""

    def __init__(self, process: Process) -> None:
        self.process, self.play = process, process.play
        saved = process.saved
        self.shared = set(saved.shared) if saved else set()
        self.held = set(saved.held) if saved else set()
        self.sent: set[str] = set()
        self.draw = random.Random(process.id)

    def learn(self, what: str) -> None:
        self.held.add(what)
        self.play.learned.add(what)

    def digest(self) -> str:
        return str(sorted(self.shared))

    def offer(self, round_: int) -> tuple[bytes, float] | None:
        if self.draw.random() < 0.1:
            return None
        pool = sorted(self.held)
        self.sent = set(self.draw.sample(pool, self.draw.randint(0, len(pool))))
        return json.dumps(sorted(self.sent)).encode(), 1.0

    def land(self, round_: int, offers: Sequence[Offer], *, mine: bool) -> None:
        counts = Counter(each for offer in offers for each in json.loads(offer.payload))
        assert max(counts.values(), default=1) == 1, "offered by two"
        assert not self.shared & counts.keys(), "counted twice"
        self.shared |= counts.keys()
        if mine:
            assert self.sent <= counts.keys(), "another offer than its own"
            self.held -= self.sent
        known = self.play.after.setdefault(round_, frozenset(self.shared))
        assert known == self.shared, "members differ after a round"

    def discard(self) -> bool:
        self.play.lost |= self.held - self.shared
        had, self.held = bool(self.held), set()
        return had

    def give(self) -> bytes:
        return json.dumps(sorted(self.shared)).encode()

    def take(self, data: bytes) -> None:
        self.discard()
        self.shared = set(json.loads(data))


class Play:
    """A drawn schedule over members of `names`, each of which takes `rounds` rounds.

    `faults` strike where they are drawn. One more, if there is an `aim`, strikes a request of a kind, after
    `skip` of that kind. `flips` bits of shared parameters flip while members train.
    """

    def __init__(
        self,
        seed: int,
        names: str,
        rounds: int,
        faults: int,
        rules: Rules,
        often: float = 0.02,
        aim: tuple[str, str] | None = None,
        skip: int = 0,
        flips: int = 0,
    ) -> None:
        self.draw, self.store, self.rules = random.Random(seed), Memory(), rules
        self.lock = threading.RLock()
        self.all_stopped = threading.Condition(self.lock)
        self.running = 0
        self.processes: list[Process] = []
        self.replicas: dict[str, Learner] = {}
        self.late: list[Callable[[], Any]] = []
        self.learned: set[str] = set()
        self.lost: set[str] = set()
        self.after: dict[int, frozenset[str]] = {}
        self.ends: dict[str, str] = {}
        self.struck: Counter[tuple[str, str]] = Counter()
        self.told: Counter[str] = Counter()
        self.flipped: list[str] = []
        self._flips = flips
        self._names, self._rounds, self._faults, self._often = names, rounds, faults, often
        self._aim, self._skip = aim, skip
        self._saves: dict[str, Save] = {}
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Play until all have ended. Raises what went wrong in any of them."""
        for name in self._names:
            self._start(name, None)
        for _ in range(MOST):
            with self.lock:
                while self.running:
                    self.all_stopped.wait()
                living = [each for each in self.processes if each.is_alive]
                if self._errors:
                    for each in living:
                        self._let_go(each, Killed())
                    raise self._errors[0]
                if not living:
                    return
                self._act(living)
        raise AssertionError(f"the play has no end: {[(each.id, each.what) for each in living]}")

    def _act(self, living: list[Process]) -> None:
        store = self.store
        awake = [each for each in living if each.wakes_s <= store.time_s]
        if not awake:
            store.time_s = min(each.wakes_s for each in living)
            self._beat(living)
            return
        store.time_s += STEP_S
        self._beat(living)
        if self.late and self.draw.random() < 0.05:
            self.late.pop(self.draw.randrange(len(self.late)))()
        process = self.draw.choice(awake)
        if self._flips and process.what == "pause" and process.seat is not None and self.draw.random() < 0.1:
            self._flips -= 1
            self.flipped.append(process.id)
            self.replicas[process.id].shared.add(f"flip {self._flips}")
        fault = self._fault(process)
        if fault is not None:
            if fault == "restart":
                self._restart()
            elif fault == "sleep":
                process.wakes_s = store.time_s + self.draw.choice([1.0, 20.0, 90.0])
                self.struck["sleep", process.what] += 1
                return
            self.struck[fault, process.what] += 1
            if fault != "restart":
                self._let_go(process, Killed() if fault == "kill" else StoreError(fault))
                return
        self._let_go(process, None)

    def _fault(self, process: Process) -> str | None:
        """What happens to a process where it stands."""
        if self._aim is not None and process.what == self._aim[1]:
            self._skip -= 1
            if self._skip < 0:
                fault, self._aim = self._aim[0], None
                return fault
        if not self._faults or self.draw.random() >= self._often:
            return None
        self._faults -= 1
        return self.draw.choice(["kill", "sleep", "lost", "answer lost", "late", "stale", "restart"])

    def _beat(self, living: list[Process]) -> None:
        """Heartbeats, which come from a thread of their own, as long as a process is not asleep."""
        for each in living:
            seat, now_s = each.seat, self.store.time_s
            asleep = each.what != "pause" and each.wakes_s > now_s
            if seat is not None and not asleep and now_s - each.beat_s >= self.rules.beat_s:
                each.beat_s = now_s
                told = Beat("", seat.round, seat.joined, seat.reads, seat.passes, seat.writes)
                self.store.put(member_key(seat.name, seat.number), told.as_bytes())

    def _let_go(self, process: Process, answer: BaseException | None) -> None:
        process.answer = answer
        self.running += 1
        process.go.set()

    def _restart(self) -> None:
        alive = {each.name for each in self.processes if each.is_alive}
        for name in self._names:
            if name not in alive:
                saved = self._saves.get(name) if self.draw.random() < 0.6 else None
                self.struck["start again", "from a save" if saved else "anew"] += 1
                self._start(name, saved)

    def _start(self, name: str, saved: Save | None) -> None:
        offset_s = self.draw.choice([0.0, -5000.0, 12345.0])
        process = Process(self, name, len(self.processes), saved, offset_s)
        self.processes.append(process)
        self.running += 1
        threading.Thread(target=self._live, args=(process,), daemon=True).start()

    def _live(self, process: Process) -> None:
        replica = self.replicas[process.id] = Learner(process)
        end = "done"
        try:
            self._train(process, replica)
        except Killed:
            end = "killed"
        except TransportError as error:
            end = f"left alone: {error}"
        except GradwireError as error:
            end = f"refused: {error}"
        except BaseException as error:
            self._errors.append(error)
        with self.lock:
            self.ends[process.id] = end
            process.is_alive = False
            if end != "done":
                self.lost |= replica.held
            self.running -= 1
            self.all_stopped.notify()

    def _train(self, process: Process, replica: Learner) -> None:
        def tell(what: str, _who: tuple[str, ...], _why: str) -> None:
            self.told[what] += 1

        saved = process.saved
        place = None if saved is None else saved.place
        process.seat = seat = enter(process, process.name, {"a": "b"}, replica, self.rules, place, tell=tell)
        draw = random.Random(process.id)
        for round_ in range(self._rounds):
            for step in range(2):
                process.pause(draw.uniform(0.5, 3.0))
                replica.learn(f"{process.id}.{round_}.{step}")
                if draw.random() < 0.2:
                    self._save(seat, replica)
            if not send(seat, replica):
                continue
            if draw.random() < 0.3:  # with a delay
                process.pause(1.0)
                replica.learn(f"{process.id}.{round_}.late")
            seal, offers = settle(seat)
            patiently(seat, partial(land, seat, replica, seal, offers))
            with suppress(StoreError):  # others do it
                if announce_snapshot(seat, seal):
                    write_snapshot(seat, seat.round, replica.give())
        patiently(seat, lambda: catch_up(seat, replica))

    def _save(self, seat: Seat, replica: Learner) -> None:
        held = frozenset(replica.held)
        place = (seat.run, seat.round, seat.waits_since)
        self._saves[seat.name] = Save(place, frozenset(replica.shared), held)

    def counted(self) -> set[str]:
        """What the seals count, also of rounds that no member has lived to land."""
        last = max(self.after, default=-1)
        found = set(self.after[last]) if self.after else set()
        while (data := self.store.get(seal_key(last + 1))) is not None:
            for each in Seal.of(data).offers:
                found |= set(json.loads(Offer.of(self.store.objects[each.key][0]).payload))
            last += 1
        return found
