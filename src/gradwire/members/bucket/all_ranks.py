"""Rounds of a site with several ranks: its first one takes them, and all do what they ask of the replica.

Rounds wait for the store, maybe for long. So they run on a thread of the first rank, whose training thread
tells the others every second that it waits: all hear signals, and no wait is longer than the limit of the
site's own process group.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from gradwire.agreement.agree import require_success
from gradwire.errors import GradwireError, TransportError
from gradwire.members.bucket.objects import StoreError
from gradwire.members.bucket.records import Offer
from gradwire.members.bucket.steps import StoredSteps

TELL_S = 1.0
"""Between two words of the first rank to the others that it waits for the store."""
_ERRORS = {each.__name__: each for each in (GradwireError, StoreError, TransportError)}
"""Errors that all ranks raise as the first one does."""


class Interrupted(Exception):
    """Signal to rounds that training does not wait for them any more, as after a signal of the user's."""


@dataclass(frozen=True)
class _Call:
    """A question of rounds to all ranks."""

    what: str
    told: Any = None
    """Said to all ranks, as JSON."""
    given: Any = None
    """For the first rank alone."""
    answer: Future[Any] = field(default_factory=Future)


class _Calls:
    """Calls from the thread of rounds to the one that trains."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Call] = SimpleQueue()
        self._is_open = True

    def ask(self, call: _Call) -> Any:
        """Return the first rank's answer. Raises what it raises, and `Interrupted` once nobody listens."""
        self.put(call)
        while not wait([call.answer], TELL_S).done:
            self.require_open()
        return call.answer.result()

    def put(self, call: _Call) -> None:
        self._queue.put(call)

    def require_open(self) -> None:
        if not self._is_open:
            raise Interrupted

    def next(self) -> _Call:
        """The next one; after a second without one, that rounds wait."""
        try:
            return self._queue.get(timeout=TELL_S)
        except Empty:
            return _Call("wait")

    def close(self) -> None:
        self._is_open = False


class AllRanks:
    """The `Replica` of all ranks of a site: `run` is for the threads that train, on all ranks together. The
    other methods are for the rounds that it runs on the first one.
    """

    def __init__(
        self,
        replica: StoredSteps,
        tells: Callable[[], dict[str, Any]],
        hears: Callable[[dict[str, Any]], None],
        landed: Callable[[], None],
    ) -> None:
        """Prepare for rounds.

        Args:
            replica: this rank's part.
            tells: on the first rank, what all ranks are to know of the run.
            hears: called with that on all ranks, when a round has landed and at the end of `run`.
            landed: called then, on all ranks, when a round has landed.
        """
        self._replica, self._tells, self._hears, self._landed = replica, tells, hears, landed
        self._calls = _Calls()
        self._thread = threading.Thread()

    def run(self, rounds: Callable[[], object]) -> None:
        """Call `rounds` on the first rank, and do what it asks. A collective: all ranks raise what it raises.

        If a rank fails in what is asked, it raises its error, and the others `PeerFailed`.
        """
        site, calls = self._replica.site, _Calls()
        if site.rank == 0:
            given = rounds, calls, self._thread
            self._thread = threading.Thread(
                target=self._call, args=given, name="gradwire rounds", daemon=True
            )
            self._thread.start()
        try:
            while True:
                call = calls.next() if site.rank == 0 else _Call("")
                heard = self._tells() if call.what in ("landed", "end") else None
                what, told, heard = json.loads(site.told(json.dumps([call.what, call.told, heard])))
                if what == "end":
                    self._hears(heard)
                    self._end(told, call.given)
                    return
                if what != "wait":
                    self._do(_Call(what, told, call.given, call.answer), heard)
        finally:
            calls.close()

    def _call(self, rounds: Callable[[], object], calls: _Calls, former: threading.Thread) -> None:
        """Call `rounds`, and ask for the end. Rounds that were interrupted end before."""
        if former.is_alive():
            former.join()
        self._calls, failure = calls, None
        try:
            rounds()
        except BaseException as error:
            failure = error
        told = None if failure is None else [type(failure).__name__, str(failure)]
        calls.put(_Call("end", told, failure))

    def _do(self, call: _Call, heard: Any) -> None:
        failure: BaseException | None = None
        try:
            found = self._done(call, heard)
        except BaseException as error:
            failure = error
        try:
            require_success(failure, f"take part in a round ({call.what})", self._replica.site.comm)
        except BaseException as error:
            call.answer.set_exception(error)
            raise
        call.answer.set_result(found)

    def _done(self, call: _Call, heard: Any) -> Any:
        replica, told = self._replica, call.told
        match call.what:
            case "digest":
                return replica.digest()
            case "offer":
                return replica.offer(told)
            case "land":
                return replica.land(told[0], call.given or (), mine=told[1])
            case "discard":
                return replica.discard()
            case "give":
                return replica.give()
            case "take":
                return replica.take(call.given or b"")
            case "land at":
                return replica.land_at(told)
            case "landed":
                self._hears(heard)
                return self._landed()
        raise AssertionError(f"{call.what} is none of its calls")

    def _end(self, told: Any, error: BaseException | None) -> None:
        if self._replica.site.rank == 0:
            self._thread.join()  # it holds the model no longer
        if error is not None:
            raise error
        if told is not None:
            kind, text = told
            raise _ERRORS.get(kind, GradwireError)(
                text if kind in _ERRORS else f"the first rank of this replica has failed: {kind}: {text}"
            )

    def require_running(self) -> None:
        """Raise `Interrupted` if training no longer waits for these rounds."""
        self._calls.require_open()

    def land_at(self, attempts: int | None) -> None:
        """Land the round that was sent at this attempted step, or when it is asked for."""
        self._calls.ask(_Call("land at", attempts))

    def landed(self) -> None:
        """Say that a round has landed."""
        self._calls.ask(_Call("landed"))

    # -- as `Replica`

    def digest(self) -> str:
        """See `Replica.digest`."""
        return str(self._calls.ask(_Call("digest")))

    def offer(self, round_: int) -> tuple[bytes, float] | None:
        """See `Replica.offer`."""
        found: tuple[bytes, float] | None = self._calls.ask(_Call("offer", round_))
        return found

    def land(self, round_: int, offers: Sequence[Offer], *, mine: bool) -> None:
        """See `Replica.land`."""
        self._calls.ask(_Call("land", [round_, mine], offers))

    def discard(self) -> bool:
        """See `Replica.discard`."""
        return bool(self._calls.ask(_Call("discard")))

    def give(self) -> bytes:
        """See `Replica.give`."""
        return bytes(self._calls.ask(_Call("give")))

    def take(self, data: bytes) -> None:
        """See `Replica.take`."""
        self._calls.ask(_Call("take", given=data))
