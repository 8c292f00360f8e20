"""Without torchft: what to install, and which addresses stand for this machine.

`tests/integrations/test_torchft.py` asks torchft's lighthouse.
"""

from __future__ import annotations

import socket
import sys

import pytest

import gradwire
from gradwire.members.address import address_towards, host_of, own_address
from gradwire.members.membership import opened


def has_ipv6() -> bool:
    """Whether this machine has the loopback's address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_without_torchft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[elastic\]' in a copy"):
        gradwire.members.torchft("http://127.0.0.1:9", "site-a")


def test_addresses_are_numbers_of_this_machine() -> None:
    assert own_address("lo") == own_address("localhost") == address_towards("127.0.0.1") == "127.0.0.1"
    assert host_of("http://10.0.0.1:29510") == "10.0.0.1"
    with pytest.raises(ValueError, match="no address of a lighthouse"):
        host_of("http://:29510")


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_store_listens_at_an_address_of_ipv6() -> None:
    assert own_address("::1") == address_towards("::1") == "::1"
    assert host_of("http://[::1]:29510") == "::1"
    store = opened("::1")
    socket.create_connection(("::1", store.port), 5.0).close()
