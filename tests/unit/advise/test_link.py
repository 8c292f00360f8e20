"""Facts about links that the system tells."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from gradwire.advise.link import card_bit_per_s, latency_s


def card(folder: Path, name: str, state: str, speed: str) -> None:
    (folder / name).mkdir()
    (folder / name / "operstate").write_text(f"{state}\n")
    (folder / name / "speed").write_text(f"{speed}\n")


def test_the_slowest_card_that_has_a_link_tells_the_rate(tmp_path: Path) -> None:
    assert card_bit_per_s(tmp_path) is None
    card(tmp_path, "lo", "unknown", "10")
    card(tmp_path, "eth0", "up", "25000")
    card(tmp_path, "eth1", "up", "10000")
    card(tmp_path, "eth2", "down", "100")
    card(tmp_path, "veth0", "up", "-1")
    card(tmp_path, "wlan0", "up", "unknown")
    assert card_bit_per_s(tmp_path) == 10e9


def test_the_kernel_tells_the_latency_of_a_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        for _ in range(20):
            one.sendall(b"ping")
            assert other.recv(4) == b"ping"
            other.sendall(b"pong")
            assert one.recv(4) == b"pong"
        found = latency_s()
        one.sendall(b"ping")
        assert other.recv(4) == b"ping", "neither descriptor was closed"
    if hasattr(socket, "TCP_INFO"):
        assert found is not None
        assert 0.0 < found < 1.0


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells round trips")
def test_a_latency_is_half_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(self: socket.socket, *_option: int) -> bytes:
        """`struct tcp_info` of a connection that is established, and has seen a round trip of 10 ms."""
        return struct.pack("=B147xI104x", 1, 10_000)

    monkeypatch.setattr(socket.socket, "getsockopt", told, raising=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        assert latency_s() == pytest.approx(0.005)
