"""Without torchft: what to install, and which addresses stand for this machine.

`tests/integrations/test_torchft.py` asks torchft's lighthouse.
"""

from __future__ import annotations

import sys

import pytest

import gradwire
from gradwire.members.address import address_towards, host_of, own_address


def test_without_torchft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ImportError, match=r"pip install 'gradwire\[elastic\]'"):
        gradwire.members.torchft("http://127.0.0.1:9", "site-a")


def test_addresses_are_numbers_of_this_machine() -> None:
    assert own_address("lo") == own_address("localhost") == address_towards("127.0.0.1") == "127.0.0.1"
    assert host_of("http://10.0.0.1:29510") == "10.0.0.1"
    with pytest.raises(ValueError, match="no address of a lighthouse"):
        host_of("http://:29510")
