"""A lighthouse in plain Python, by the rules of torchft's, and members: for tests without torchft.

A quorum is formed of those who ask, once they are enough and more than half of those that live, and all that
live have asked or the grace is over.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from contextlib import suppress
from typing import Any
from uuid import uuid4

from gradwire.errors import TransportError
from gradwire.members.address import address_towards
from gradwire.members.base import Card, Entry, Roster

BEAT_S = 0.1


class Lighthouse:
    """Listens at an address, by default on the loopback, until it is closed."""

    def __init__(
        self,
        at_least: int,
        grace_s: float = 5.0,
        dead_s: float = 1.0,
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.rosters: list[list[str]] = []
        """Names of the members of each."""
        self._least, self._grace_s, self._dead_s = at_least, grace_s, dead_s
        self._changed = threading.Condition()
        self._beats: dict[str, float] = {}
        self._asking: dict[str, tuple[float, str, dict[str, str]]] = {}
        self._formed: dict[str, Any] = {}
        lighthouse = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):  # a member that was killed
                    for line in self.rfile:
                        self.wfile.write((json.dumps(lighthouse._answer(*json.loads(line))) + "\n").encode())

        socketserver.ThreadingTCPServer.daemon_threads = True
        self._server = socketserver.ThreadingTCPServer(address, Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, what: str, id_: str, name: str = "", told: Any = None, limit_s: float = 0.0) -> Any:
        with self._changed:
            self._beats[id_] = time.monotonic()
            if what == "beat":
                return None
            self._formed.pop(id_, None)
            self._asking[id_] = (time.monotonic(), name, told)
            until_s = time.monotonic() + limit_s
            while id_ not in self._formed:
                self._form()
                if id_ not in self._formed and not self._changed.wait(0.02) and time.monotonic() > until_s:
                    return None
            return self._formed.pop(id_)

    def _form(self) -> None:
        now = time.monotonic()
        living = [each for each, at in self._beats.items() if now - at < self._dead_s]
        asking = [each for each in self._asking if each in living]
        if len(asking) < self._least or 2 * len(asking) <= len(living):
            return
        waited = now - min(self._asking[each][0] for each in asking)
        if len(asking) < len(living) and waited < self._grace_s:
            return
        entries = [[self._asking[each][1], each, self._asking[each][2]] for each in asking]
        moment = time.time_ns() // 1000
        for each in asking:
            del self._asking[each]
            self._formed[each] = [moment, entries]
        self.rosters.append(sorted(name for name, _id, _told in entries))
        self._changed.notify_all()


class Asking:
    """`Members` of a process, by a `Lighthouse`."""

    def __init__(
        self,
        port: int,
        name: str,
        quorum_s: float = 30.0,
        alone_s: float | None = None,
        host: str = "127.0.0.1",
        address: str | None = None,
    ) -> None:
        self.name, self.id, self._quorum_s = name, f"{name}:{uuid4().hex[:6]}", quorum_s
        self._lighthouse, self.address = (host, port), address or address_towards(host)
        self._stops, self.alone_s = threading.Event(), alone_s
        self._line, self._beat_line = self._connected(), self._connected()
        threading.Thread(target=self._beat, daemon=True).start()

    def _connected(self) -> Any:
        return socket.create_connection(self._lighthouse).makefile("rw")

    def _beat(self) -> None:
        while not self._stops.wait(BEAT_S):
            with suppress(OSError, ValueError):
                self._say(self._beat_line, ["beat", self.id])

    @staticmethod
    def _say(line: Any, told: Any) -> Any:
        line.write(json.dumps(told) + "\n")
        line.flush()
        return json.loads(line.readline())

    def ask(self, card: Card) -> Roster:
        found = self._say(self._line, ["quorum", self.id, self.name, card.as_dict(), self._quorum_s])
        if found is None:
            raise TransportError("no quorum in time")
        moment, entries = found
        return Roster(moment, tuple(Entry(name, id_, Card.of(told)) for name, id_, told in entries))

    def close(self) -> None:
        self._stops.set()
