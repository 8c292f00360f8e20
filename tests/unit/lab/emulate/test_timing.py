"""The arithmetic of waiting: a wire that transfers share, a line that holds packets. No clock runs here."""

import math

import pytest

from gradwire_lab.emulate import EmulatedLink
from gradwire_lab.emulate.delayed_group import BOTH, Cable
from gradwire_lab.emulate.link import WireFile
from gradwire_lab.emulate.relay import DelayLine


@pytest.fixture
def file():
    shared = WireFile.create(EmulatedLink(8e6, 0.5))
    yield shared
    shared.close()


def test_transfers_queue_but_latency_does_not_occupy_the_wire(file):
    wire = Cable(file)
    assert wire.reserve(2, 1e6, BOTH, 10.0) == pytest.approx(10 + 1 + 2 * 0.5)
    assert wire.reserve(0, 2e6, BOTH, 10.0) == pytest.approx(10 + 1 + 2)
    assert wire.reserve(0, 1e6, BOTH, 20.0) == pytest.approx(21)


def test_the_wire_is_full_duplex(file):
    wire = Cable(file)
    assert wire.reserve(0, 1e6, ("out",), 0.0) == pytest.approx(1)
    assert wire.reserve(0, 1e6, ("in",), 0.0) == pytest.approx(1)
    assert wire.reserve(0, 1e6, BOTH, 0.0) == pytest.approx(2)


def test_a_change_of_the_link_reaches_those_who_read_the_file(file):
    other = WireFile(file.path)
    assert other.read() == (8e6, 0.5)
    file.write(EmulatedLink(None, 0.25))
    assert other.read() == (math.inf, 0.25)
    assert Cable(other).reserve(1, 1e9, BOTH, 1.0) == pytest.approx(1.25)
    other.close()


def test_packets_leave_after_the_delay_in_their_order():
    line = DelayLine()
    line.delay_s = 2.0
    line.push(b"first", 0.0)
    line.delay_s = 0.5
    line.push(b"second", 1.0)  # would be due at 1.5, but may not overtake
    assert line.wait_s(0.5) == pytest.approx(1.5)
    assert line.pop(1.9) is None
    assert [line.pop(2.0), line.pop(2.0), line.pop(9.0)] == [b"first", b"second", None]
    assert line.held_bytes == 0
    assert line.wait_s(3.0) is None
