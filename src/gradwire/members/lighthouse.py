"""Members found by torchft's lighthouse, which monitors who is alive and forms quorums. The one file about
torchft.

It uses the public `torchft.coordination.LighthouseClient`, which is equal in its releases: `quorum`, whose
`data` all members of a quorum see, and `heartbeat`.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal
from uuid import uuid4

from gradwire.arguments import as_python, is_time, problem_of
from gradwire.errors import TransportError
from gradwire.measure.clock import now_s
from gradwire.members.address import address_towards, host_of, is_loopback, own_address
from gradwire.members.base import Card, Entry, Roster

_LOG = logging.getLogger("gradwire")

HEARTBEAT_S = 1.0
"""Between two heartbeats."""
CONNECT_S = 10.0
PAUSE_S = 0.5
"""Between two attempts to reach a lighthouse that may be starting again."""
ALONE_S = 10.0
_NAME = "name"


class Torchft:
    """`Members` of a run, by its lighthouse."""

    def __init__(
        self, lighthouse: str, name: str, address: str | None, quorum_s: float, alone_s: float | None
    ) -> None:
        """See `torchft`."""
        try:
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            raise ImportError(
                "gradwire.members.torchft needs torchft: pip install 'gradwire[elastic]'"
            ) from error
        if not name or not isinstance(name, str):
            raise ValueError(f"name={name!r} is no name of this replica, such as 'site-a'")
        host = host_of(lighthouse)
        self.address = address_towards(host) if address is None else own_address(address)
        if is_loopback(self.address) and not is_loopback(address_towards(host)):
            raise ValueError(
                f"address={address!r} is {self.address}, which only this machine can reach, while the "
                f"lighthouse {lighthouse} is elsewhere: pass an address or interface that the others reach"
            )
        self.name, self._lighthouse, self._quorum_s = name, lighthouse, quorum_s
        self.alone_s = alone_s
        self.id = f"{name}:{uuid4().hex[:8]}"
        self._connect: Callable[[], Any] = lambda: LighthouseClient(lighthouse, timedelta(seconds=CONNECT_S))
        self._client: Any = None
        self._stops = threading.Event()
        try:
            self._client = self._connect()
        except Exception as error:
            raise TransportError(f"no lighthouse answers at {lighthouse}: {error}") from error
        self.beat()  # from now on others wait for this member, as they do for any that lives
        beats = threading.Thread(target=_beat, args=(weakref.ref(self), self._stops), daemon=True)
        beats.name = "gradwire heartbeat"
        beats.start()
        weakref.finalize(self, self._stops.set)
        _LOG.info("%s is at %s, and its lighthouse at %s", name, self.address, lighthouse)

    def ask(self, card: Card) -> Roster:
        """The next quorum. Raises `TransportError` at the limit, or if there is no lighthouse until then."""
        until_s = now_s() + self._quorum_s
        while True:
            left_s = max(until_s - now_s(), 0.1)
            try:
                if self._client is None:
                    self._client = self._connect()
                found = self._client.quorum(
                    replica_id=self.id,
                    timeout=timedelta(seconds=left_s),
                    address=card.address,
                    store_address=card.address,
                    step=max(card.rounds, 0),
                    world_size=1,
                    shrink_only=False,
                    data={_NAME: json.dumps(self.name), **card.as_dict()},
                )
            except Exception as error:  # of several types, of which some say that a time is over
                if now_s() >= until_s - PAUSE_S:
                    raise TransportError(
                        f"no quorum at {self._lighthouse} in {self._quorum_s:.0f} s: {error}"
                    ) from error
                self._client = None
                self._stops.wait(PAUSE_S)
            else:
                return _roster(found)

    def beat(self) -> None:
        """Send the lighthouse a heartbeat of this member."""
        client = self._client
        if client is not None:
            with suppress(Exception):  # which the next question will meet as well
                client.heartbeat(self.id, timedelta(seconds=CONNECT_S))

    def close(self) -> None:
        """Let the lighthouse forget this member, after its heartbeat's timeout."""
        self._stops.set()


def _beat(members: weakref.ref[Torchft], stops: threading.Event) -> None:
    while not stops.wait(HEARTBEAT_S):
        here = members()
        if here is None:
            return
        here.beat()
        del here


def _roster(quorum: Any) -> Roster:
    """A quorum of torchft as a roster."""
    entries = []
    for each in quorum.participants:
        told = dict(each.data or {})
        try:
            name = json.loads(told.pop(_NAME))
            entries.append(Entry(name, each.replica_id, Card.of(told)))
        except (KeyError, TypeError, ValueError):
            entries.append(Entry(str(each.replica_id), each.replica_id, None))
    created = quorum.created
    return Roster(created.seconds * 10**6 + created.nanos // 10**3, tuple(entries))


def torchft(
    lighthouse: str,
    name: str,
    *,
    address: str | None = None,
    quorum_s: float = 3600.0,
    alone: Literal["wait", "train"] = "wait",
) -> Torchft:
    """Replicas that find each other by torchft's lighthouse at the URL `lighthouse`.

    Each replica has a `name` of its own, which stays the same when it starts again. `address` is where the
    other members reach this one: an IP address or an interface of this machine. By default it is the address
    from which this machine reaches the lighthouse. A round waits `quorum_s` seconds at most for enough
    members; then `optimizer.step()` raises `TransportError`. With `alone="train"`, local steps go on after 10
    seconds without a quorum, and the round comes once there is one. `gradwire lighthouse` starts one.

    Needs the extra `gradwire[elastic]`. Raises `ImportError` without it, `ValueError` for a wrong argument,
    and `TransportError` if no lighthouse answers.

    Example::

        members = gradwire.members.torchft("http://lighthouse:29510", name="site-a")
        wire = gradwire.outer(model, optimizer, "int4", every=30, members=members)
    """
    if alone not in ("wait", "train"):
        raise ValueError(f"alone={alone!r} is neither 'wait' nor 'train'")
    words = {"lighthouse": lighthouse, "name": name, "address": address}
    if problem := problem_of(torchft, words):
        raise ValueError(problem)
    quorum_s = as_python(quorum_s)
    if not is_time(quorum_s):
        raise ValueError(f"quorum_s={quorum_s!r} is not a time above 0, of 10^6 seconds at most")
    return Torchft(lighthouse, name, address, quorum_s, ALONE_S if alone == "train" else None)
