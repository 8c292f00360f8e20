"""Members found by torchft's lighthouse, which monitors who is alive and forms quorums. The one file about
torchft.

It uses the public `torchft.coordination`: `LighthouseClient.quorum`, whose `data` all members of a quorum
see, and `ManagerServer` for its heartbeats alone. Who lives, in a quorum or not, is on the lighthouse's page
for people.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import weakref
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from html import unescape
from http.client import HTTPConnection
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

from gradwire.arguments import as_python, is_time, problem_of
from gradwire.comm.apart import begin
from gradwire.errors import TransportError
from gradwire.measure.clock import now_s
from gradwire.members.address import address_towards, host_of, is_loopback, own_address
from gradwire.members.base import Card, Entry, Roster
from gradwire.members.plan import awaited
from gradwire.version import EXTRA

_LOG = logging.getLogger("gradwire")

HEARTBEAT_S = 1.0
"""Between two heartbeats."""
SETTLE_S = 2.5
"""After a lighthouse has started again: by then the heartbeats of all that live have reached it."""
CONNECT_S = 10.0
PAUSE_S = 0.5
"""Between two attempts to reach a lighthouse that may be starting again."""
ALONE_S = 10.0
_NAME = "name"


class Torchft:
    """`Members` of a run, by its lighthouse.

    Every rank of a replica has one, and only the first one asks. Heartbeats begin where one asks: the
    lighthouse waits for more than half of those that it hears of.
    """

    def __init__(
        self, lighthouse: str, name: str, address: str | None, quorum_s: float, alone_s: float | None
    ) -> None:
        """See `torchft`."""
        try:
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            raise ImportError(f"gradwire.members.torchft needs torchft: {EXTRA.format('elastic')}") from error
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
        self._stops = threading.Event()
        self._beats: Any = None
        self._last_quorum = 0
        """The lighthouse's number of the last quorum. It begins anew with the lighthouse."""
        try:
            # On a thread of its own: Python hears no signal inside of it.
            self._client = begin(lambda: LighthouseClient(lighthouse, timedelta(seconds=CONNECT_S))).result()
        except Exception as error:
            raise TransportError(f"no lighthouse answers at {lighthouse}: {error}") from error
        _LOG.info("%s is at %s, and its lighthouse at %s", name, self.address, lighthouse)

    def ask(self, card: Card) -> Roster:
        """The next quorum. Raises `TransportError` at the limit, or if there is no lighthouse until then."""
        until_s, why = now_s() + self._quorum_s, ""
        while (left_s := until_s - now_s()) > 0.0 and not self._stops.is_set():
            try:
                self._beat(min(CONNECT_S, left_s))
                living, number = self._status()
                if number < self._last_quorum:  # it has started again, and does not know the others yet
                    self._last_quorum = 0
                    self._stops.wait(min(SETTLE_S, left_s))
                    continue
                found = self._client.quorum(
                    replica_id=self.id,
                    timeout=timedelta(seconds=left_s),
                    address=card.address,
                    store_address=card.address,
                    step=max(card.rounds, 0),
                    world_size=1,
                    shrink_only=False,
                    data={_NAME: json.dumps(self.name), **replace(card, living=living).as_dict()},
                )
            except Exception as error:  # of several types, of which some say that a time is over
                why = str(error)
                self._stops.wait(min(PAUSE_S, max(until_s - now_s(), 0.0)))
                continue
            self._last_quorum = int(found.quorum_id)
            roster = _roster(found)
            if not (late := awaited(roster)):
                return roster
            why = f"nobody here has begun, and {', '.join(sorted(late))} live and have not asked"
        raise TransportError(f"no quorum at {self._lighthouse} in {self._quorum_s:.0f} s: {why}")

    def _beat(self, connect_s: float) -> None:
        """Send heartbeats from now on: others wait for this member, as they do for any that lives.

        torchft's manager sends them from a thread of its own, which does not need the interpreter: compiling
        a kernel may hold that for longer than a lighthouse waits. Nobody else reaches the manager.
        """
        if self._beats is None:
            from torchft.coordination import ManagerServer

            self._beats = ManagerServer(
                replica_id=self.id,
                lighthouse_addr=self._lighthouse,
                hostname="127.0.0.1",
                bind="127.0.0.1:0",
                store_addr="",
                world_size=1,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
                connect_timeout=timedelta(seconds=connect_s),
                quorum_retries=0,
            )
            weakref.finalize(self, self._beats.shutdown)

    def _status(self) -> tuple[tuple[str, ...], int]:
        """(Ids of all that live, number of the last quorum), as the lighthouse's own page has them."""
        parts = urlsplit(self._lighthouse if "//" in self._lighthouse else f"//{self._lighthouse}")
        with closing(HTTPConnection(parts.hostname or "", parts.port or 80, timeout=CONNECT_S)) as page:
            page.request("GET", "/status")
            text = page.getresponse().read().decode(errors="replace")
        number = _QUORUM.search(text)
        living = tuple(unescape(each[1]) for each in _HEARTBEAT.finditer(text))
        return living, self._last_quorum if number is None else int(number[1])

    def close(self) -> None:
        """Let the lighthouse forget this member, after its heartbeat's timeout."""
        self._stops.set()
        if self._beats is not None:
            self._beats.shutdown()


_QUORUM = re.compile(r"Current quorum_id: (\d+)")
_HEARTBEAT = re.compile(r'<li class="heartbeat\s*">\s*(.*?): seen')
"""Of a member that lives: others have another class beside."""


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

    Needs the extra `elastic`. Raises `ImportError` without it, `ValueError` for a wrong argument,
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
