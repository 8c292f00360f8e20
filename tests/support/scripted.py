"""Members in one process, by a script: they join, die, sleep and are cut off in every phase of a round.

Each process of the play is a thread that runs the real `take_round`, on a replica whose parameters are sets
of things learned. It stops at every point where something can happen to it. When all have stopped, a drawn
action is taken: a quorum is formed, a message arrives with all or only with some, a process dies, sleeps,
wakes up, or starts again. So a schedule is a seed, time passes only by actions, and a play without an action
hangs.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gradwire.errors import GradwireError, PeerFailed, TransportError
from gradwire.members.base import Card, Entry, Roster
from gradwire.members.plan import RoundPlan, awaited
from gradwire.members.round import take_round

MOST = 20_000
"""Actions of a play: far more than any needs."""

OFTEN = 0.1
"""How often a fault is drawn while any are left: so they come in all rounds, and not all in the first one."""

WHOLE = ("meet", "exchange", "heal", "vote")
"""Calls that end when all who take part have made them."""


class Killed(BaseException):
    """The process is no more."""


class Broken(Exception):
    """The process has failed by itself, as without memory."""


@dataclass
class Save:
    """The things that a replica would find on its disk."""

    run: str
    rounds: int
    number: int
    tried: int
    shared: frozenset[str]
    unsent: frozenset[str]


@dataclass
class Process:
    """A thread of the play: one start of a member."""

    play: Play
    name: str
    id: str
    number: int
    saved: Save | None
    beats: bool = False
    """Whether the lighthouse takes it to be alive."""
    is_alive: bool = True
    sleeps: bool = False
    call: tuple[str, Any] | None = None
    """The point at which it has stopped, and what it is about."""
    answer: Any = None
    has_answer: bool = False
    go: threading.Event = field(default_factory=threading.Event)

    def stop(self, what: str, about: Any = None) -> Any:
        """Stop here until the play goes on; its answer, or an error that it decides on."""
        with self.play.lock:
            self.call, self.has_answer = (what, about), False
            self.play.running -= 1
            self.play.all_stopped.notify()
        self.go.wait()
        self.go.clear()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def reply(self, answer: Any) -> None:
        """Let it go on, at once or when it wakes up."""
        self.answer, self.has_answer = answer, True
        if not self.sleeps:
            self.release()

    def release(self) -> None:
        self.call = None
        self.play.running += 1
        self.go.set()


class Simulated:
    """A replica whose parameters are sets of texts; of what it has learned a drawn part is sent."""

    def __init__(self, process: Process) -> None:
        self.process, self.play = process, process.play
        saved = process.saved or Save("", -1, -1, -1, frozenset(), frozenset())
        self.run, self.rounds, self.number, self.tried = saved.run, saved.rounds, saved.number, saved.tried
        self.shared, self.unsent = set(saved.shared), set(saved.unsent)
        self.learned: set[str] = set()
        self.is_established, self.meeting, self.joins = False, "", True
        self.draw = random.Random(process.id)
        self.came: set[str] = set()
        self.kept: set[str] = set()

    @property
    def held(self) -> set[str]:
        return self.learned | self.unsent

    def learn(self, what: str) -> None:
        self.learned.add(what)
        self.play.learned.add(what)

    def save(self) -> Save:
        """Between two rounds."""
        shared = frozenset(self.shared)
        return Save(self.run, self.rounds, self.number, self.tried, shared, frozenset(self.held))

    def card(self) -> Card:
        return Card(
            terms={},
            address="nowhere:1",
            run=self.run,
            rounds=self.rounds,
            number=self.number,
            counted=len(self.shared),
            tried=self.tried,
            checksum=str(sorted(self.shared)),
            established=self.is_established,
            joins=self.joins,
            meeting=self.meeting,
            born=self.process.number,
        )

    def meet(self, plan: RoundPlan) -> None:
        self.meeting = ""
        self.process.stop("meet", (plan.meeting, plan.names))
        self.meeting = plan.meeting

    def heal(self, plan: RoundPlan) -> None:
        mine = self.process.name
        if mine == plan.source or mine in plan.heals:
            who = (plan.source, *plan.heals)
            given = (frozenset(self.shared), self.rounds, self.number) if mine == plan.source else None
            found = self.process.stop("heal", (plan.meeting, who, mine, given))
            if mine in plan.heals:
                shared, rounds, number = found[plan.source]
                self.play.lost |= (self.shared | self.held) - shared
                self.shared, self.rounds, self.number = set(shared), rounds, number
                self.learned, self.unsent = set(), set()
        self.run = plan.run
        if plan.begins:
            self.rounds = 0

    def be_ready(self, plan: RoundPlan) -> None:
        self.run = plan.run

    def exchange(self, plan: RoundPlan) -> bool:
        self.tried, self.run = plan.number, plan.run
        pool = sorted(self.held)
        sent = set(self.draw.sample(pool, self.draw.randint(0, len(pool))))
        mine = self.process.name
        self.process.stop("exchange", (plan.meeting, plan.names, mine, None))
        told = self.process.stop("vote", (plan.meeting, plan.names, mine, sent))
        counts = Counter(each for sent_by in told.values() for each in sent_by)
        assert max(counts.values(), default=1) == 1, "sent by two"
        self.came, self.kept = set(counts), self.held - sent
        return True

    def land(self, number: int) -> None:
        self.process.stop("land")
        assert not self.came & self.shared, "counted twice"
        self.shared |= self.came
        self.learned, self.unsent = set(), self.kept
        self.rounds, self.number, self.is_established = self.rounds + 1, number, True
        self.play.committed += 1

    def lose(self, error: BaseException) -> None:
        self.play.aborted.add(self.meeting)
        self.meeting = ""


class _Asks:
    """`Members` of a process in the play."""

    address, alone_s = "nowhere", None

    def __init__(self, process: Process) -> None:
        self.name, self.id, self._process = process.name, process.id, process

    def ask(self, card: Card) -> Roster:
        while True:
            self._process.beats = True
            living = [each.id for each in self._process.play.processes if each.beats]
            found: Roster = self._process.stop("ask", replace(card, living=living))
            if not awaited(found):
                return found

    def close(self) -> None:
        self._process.beats = False


class Play:
    """A drawn schedule over members of `names`, each of which takes `rounds` rounds."""

    def __init__(self, seed: int, names: Iterable[str], rounds: int, faults: int, at_least: int = 1) -> None:
        self.draw = random.Random(seed)
        self.lock = threading.RLock()
        self.all_stopped = threading.Condition(self.lock)
        self.running = 0
        self.processes: list[Process] = []
        self.replicas: dict[str, Simulated] = {}
        self.learned: set[str] = set()
        self.lost: set[str] = set()
        self.aborted: set[str] = set()
        self.ends: list[tuple[str, str]] = []
        self.committed = self.happened = 0
        """Landings of all members, and faults."""
        self.struck: set[tuple[str, str]] = set()
        """Faults, each with the call in which it came."""
        self._rounds, self._faults, self._least, self._moment = rounds, faults, at_least, 0
        self._names, self._saves = list(names), dict[str, Save]()
        self._errors: list[BaseException] = []
        self._ghosts: list[tuple[Process, Card]] = []
        """Processes that died while they asked, and what they said."""

    def run(self) -> None:
        """Play until all have ended. Raises what went wrong in any of them."""
        for name in self._names:
            self._start(name)
        for _ in range(MOST):
            with self.lock:
                while self.running:
                    self.all_stopped.wait()
                if self._errors:
                    self._end_all()
                    raise self._errors[0]
                if not self._stopped():
                    return
                actions, faults = self._actions(), self._accidents()
                if faults and (not actions or self.draw.random() < OFTEN):
                    actions = faults
                if not actions:
                    told = [(each.id, each.call and each.call[0]) for each in self._stopped()]
                    self._end_all()
                    raise AssertionError(f"nothing can go on: {told}")
                self.draw.choice(actions)()
        raise AssertionError("the play has no end")

    # -- processes

    def _start(self, name: str, saved: Save | None = None) -> None:
        number = len(self.processes)
        process = Process(self, name, f"{name}#{number}", number, saved)
        self.processes.append(process)
        self.running += 1
        threading.Thread(target=self._live, args=(process,), daemon=True).start()

    def _live(self, process: Process) -> None:
        replica = self.replicas[process.id] = Simulated(process)
        asks, end = _Asks(process), "done"
        try:
            take_round(asks, replica)
            replica.joins = False
            for round_ in range(self._rounds):
                for step in range(2):
                    process.stop("work")
                    replica.learn(f"{process.id}.{round_}.{step}")
                take_round(asks, replica)
                self._saves[process.name] = replica.save()
        except Killed:
            end = "killed"
        except Broken:
            end = "broken"
        except TransportError:
            end = "left alone"
        except GradwireError as error:
            end = f"refused: {error}"
        except BaseException as error:
            self._errors.append(error)
        with self.lock:
            self.ends.append((process.id, end))
            process.is_alive, process.call = False, None
            if end != "killed":
                process.beats = False
            if end not in ("done", "left alone"):
                self.lost |= replica.shared | replica.held
            self.running -= 1
            self.all_stopped.notify()

    def _stopped(self) -> list[Process]:
        return [each for each in self.processes if each.is_alive]

    def _end_all(self) -> None:
        for each in self._stopped():
            each.sleeps = False
            each.reply(Killed())

    # -- actions

    def _actions(self) -> list[Callable[[], object]]:
        found: list[Callable[[], object]] = []
        awake = [each for each in self._stopped() if not each.sleeps]
        busy = [each for each in awake if each.call is not None and each.call[0] in ("work", "land")]
        found += [partial(each.reply, None) for each in busy]
        for each in self.processes:
            if each.is_alive and each.sleeps:
                found.append(lambda each=each: self._wake(each))
            if each.beats and (each.sleeps or not each.is_alive):
                found.append(lambda each=each: setattr(each, "beats", False))
        found += self._quorum(awake) + self._meetings(awake)
        alive = {each.name for each in self._stopped()}
        for name in self._names if self._faults else ():
            killed = [
                each for each, end in self.ends if end in ("killed", "broken") and each.startswith(f"{name}#")
            ]
            if name not in alive and len(killed) == len([1 for e in self.processes if e.name == name]):
                found.append(lambda name=name: self._restart(name))
        return found

    def _accidents(self) -> list[Callable[[], object]]:
        """Those that may come now, while any are left."""
        if self._faults <= self.happened:
            return []
        found: list[Callable[[], object]] = [self._restart_lighthouse, self._set_clock_back]
        awake = [each for each in self._stopped() if not each.sleeps]
        for each in awake:
            found += [lambda each=each: self._kill(each), lambda each=each: self._sleep(each)]
            if each.call is not None and each.call[0] in ("exchange", "vote", "heal", "meet"):
                found.append(lambda each=each: self._break(each))
            if each.beats:
                found.append(lambda each=each: self._silence(each))
        for (what, meeting), here in _together(awake).items():
            if self._is_whole(meeting, here):
                found += [lambda here=here, what=what: self._some(here, what)] * len(here)
        return found

    def _restart(self, name: str) -> None:
        saved = self._saves.get(name) if self.draw.random() < 0.5 else None
        self.struck.add(("start again", "from a save" if saved else "anew"))
        self._start(name, saved)

    def _kill(self, process: Process) -> None:
        self._strike("kill", process)
        if process.call is not None and process.call[0] == "ask" and self.draw.random() < 0.5:
            self._ghosts.append((process, process.call[1]))
        self.aborted.add(self.replicas[process.id].meeting)
        process.reply(Killed())

    def _break(self, process: Process) -> None:
        """It fails by itself, and says so to the others."""
        self._strike("break", process)
        process.reply(Broken("no memory"))

    def _silence(self, process: Process) -> None:
        """Nothing is heard of it until it asks again, although it lives."""
        self._strike("silence", process)
        process.beats = process.call is not None and process.call[0] == "ask"

    def _restart_lighthouse(self) -> None:
        """It has forgotten all, and knows those that are heard of again."""
        self.happened += 1
        self._ghosts.clear()
        for each in self.processes:
            each.beats &= each.is_alive and not each.sleeps

    def _set_clock_back(self) -> None:
        """The lighthouse's: moments come again."""
        self.happened += 1
        self._moment = self.draw.randint(0, self._moment)

    def _strike(self, fault: str, process: Process) -> None:
        self.happened += 1
        assert process.call is not None
        self.struck.add((fault, process.call[0]))

    def _sleep(self, process: Process) -> None:
        self._strike("sleep", process)
        process.sleeps = True

    def _wake(self, process: Process) -> None:
        process.sleeps = False
        if process.has_answer:
            process.release()

    def _quorum(self, awake: list[Process]) -> list[Callable[[], object]]:
        asking = [each for each in awake if each.call is not None and each.call[0] == "ask"]
        beating = [each for each in self.processes if each.beats]
        if not asking:
            return []
        enough = len(asking) >= self._least and 2 * len(asking) > len(beating)
        # With a long grace the lighthouse waits for all that live.
        if enough and (self._faults or len(asking) == len(self._stopped())):
            return [lambda: self._form(asking)]
        nobody_else = len(asking) == len(self._stopped()) and all(each in asking for each in beating)
        return [lambda: [each.reply(TransportError("no quorum")) for each in asking]] if nobody_else else []

    def _form(self, asking: list[Process]) -> None:
        self._moment += 1
        ghosts = [(process, card) for process, card in self._ghosts if process.beats]
        said = [(each, each.call[1]) for each in asking if each.call is not None] + ghosts
        entries = tuple(Entry(each.name, each.id, card) for each, card in said)
        self._check([card for _process, card in said])
        self.draw.shuffle(asking)
        for each in asking:
            each.reply(Roster(self._moment, entries))

    @staticmethod
    def _check(cards: list[Card]) -> None:
        """The invariant: whoever has the same number has the same shared parameters."""
        known: dict[int, str] = {}
        for card in cards:
            if card.number >= 0:
                assert known.setdefault(card.number, card.checksum) == card.checksum, "parted"

    def _meetings(self, awake: list[Process]) -> list[Callable[[], object]]:
        """Of each thing that several do together: it ends well, or for some, or fails."""
        found: list[Callable[[], object]] = []
        for (what, meeting), here in _together(awake).items():
            if self._is_whole(meeting, here):
                found.append(lambda here=here, what=what: self._all(here, what, here))
            elif meeting in self.aborted or self._is_missed(what, meeting, _named(here), here):
                found.append(lambda here=here: self._fail(here))
        return found

    def _is_whole(self, meeting: str, here: list[Process]) -> bool:
        """Whether all who are in it are here, and nothing has broken it."""
        return {each.name for each in here} == _named(here) and meeting not in self.aborted

    def _is_missed(self, what: str, meeting: str, names: set[str], here: list[Process]) -> bool:
        """Whether somebody does not come in time: it is dead, sleeps, or is busy with something else."""
        missing = names - {each.name for each in here}
        coming = {
            each.name
            for each in self._stopped()
            if not each.sleeps
            and each.call is not None
            and each.call[0] in WHOLE
            and each.call[1][0] == meeting
        }
        return bool(missing - coming)

    def _all(self, here: list[Process], what: str, hear: list[Process]) -> None:
        told = {each.name: each.call[1][3] for each in here if each.call} if what != "meet" else None
        for each in here:
            each.reply(told if each in hear else TransportError(f"{what} has not come"))

    def _some(self, here: list[Process], what: str) -> None:
        """A link is cut, or a process stops, and only some hear the end of it."""
        self._strike("cut", here[0])
        hear = self.draw.sample(here, self.draw.randint(0, len(here) - 1))
        if hear and self.draw.random() < 0.5:
            self.draw.choice(hear).sleeps = True
        self._all(here, what, hear)

    def _fail(self, here: list[Process]) -> None:
        for each in here:
            each.reply(self.draw.choice([TransportError, PeerFailed])("a peer is gone"))


def _together(awake: Iterable[Process]) -> dict[tuple[str, str], list[Process]]:
    """Processes by what they do together, and by their meeting."""
    calls: dict[tuple[str, str], list[Process]] = {}
    for each in awake:
        if each.call is not None and each.call[0] in WHOLE:
            calls.setdefault((each.call[0], each.call[1][0]), []).append(each)
    return calls


def _named(here: Sequence[Process]) -> set[str]:
    """All who are in it."""
    return set(here[0].call[1][1]) if here[0].call else set()
