"""Members that connect: a replica that cannot reach one of them keeps no connection with the others."""

from __future__ import annotations

import gc
import socket
from contextlib import closing
from dataclasses import replace

import pytest
import torch

import gradwire
from gradwire.errors import TransportError
from gradwire.members.base import Card, Entry, Roster
from tests.support.models import perceptron


class Beside:
    """`Members` of one replica, which finds others at `addresses`."""

    name = id = "site-a"
    address = "127.0.0.1"
    alone_s = None

    def __init__(self, addresses: list[str]) -> None:
        self._addresses, self._asked = addresses, 0

    def ask(self, card: Card) -> Roster:
        self._asked += 1
        others = [
            Entry(f"site-{number}", f"site-{number}", replace(card, address=address))
            for number, address in enumerate(self._addresses)
        ]
        return Roster(self._asked, (Entry(self.name, self.id, card), *others))

    def close(self) -> None:
        """Nothing is held."""


def listening() -> tuple[socket.socket, str]:
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    return server, f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.rest
def test_a_member_that_is_not_there_leaves_no_connection_with_the_others_open() -> None:
    server, here = listening()
    gone, away = listening()
    gone.close()
    with closing(server):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with pytest.raises(TransportError, match="site-0 is not there"):
            gradwire.outer(model, optimizer, "int4", every=1, members=Beside([away, here]))
        gc.collect()
        server.settimeout(0.2)
        came = 0
        while True:
            try:
                connection, _address = server.accept()
            except TimeoutError:
                break
            with connection:
                connection.settimeout(5.0)
                assert connection.recv(1) == b""
                came += 1
    assert came > 0
