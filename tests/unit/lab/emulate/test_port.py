"""Ports for ranks to meet at."""

from __future__ import annotations

import random
import socket

import pytest

from gradwire_lab.emulate import free_port


def test_a_free_port_is_one_to_listen_on_and_below_those_that_connections_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank's namespace hands out the same ports to its connections, and nobody outside sees which."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        mine = taken.getsockname()[1]
        free = free_port()
        assert free < 32_768
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [mine, free])
        assert free_port() == free, "a port that is taken was given out"
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [mine])
        with pytest.raises(OSError, match="none of a hundred ports is free"):
            free_port()
