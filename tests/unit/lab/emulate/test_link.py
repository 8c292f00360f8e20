"""Rates and delays as people type them."""

import pytest

from gradwire_lab.emulate import Counters, EmulatedLink, parse_delay, parse_rate


@pytest.mark.parametrize(
    ("text", "bit_per_s"),
    [
        ("200mbit", 200e6),
        ("1.5 Gbit/s", 1.5e9),
        ("64kbps", 64e3),
        ("8000bit", 8e3),
        (" 1GBIT ", 1e9),
        ("unlimited", None),
        ("none", None),
        (None, None),
    ],
)
def test_rates(text, bit_per_s):
    assert parse_rate(text) == bit_per_s


@pytest.mark.parametrize(
    "text", ["", "200", "mbit", "-5mbit", "200mb", "1e9bit", "0mbit", "1kbit", "200mbit!", "10MBps"]
)
def test_a_rate_that_makes_no_sense_is_named(text):
    with pytest.raises(ValueError, match="rate"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "delay_s"), [("5ms", 5e-3), ("250us", 250e-6), ("0.1 s", 0.1), ("0", 0.0), (None, 0.0)]
)
def test_delays(text, delay_s):
    assert parse_delay(text) == pytest.approx(delay_s)


@pytest.mark.parametrize("text", ["", "5", "ms", "-1ms", "5min", "11s"])
def test_a_delay_that_makes_no_sense_is_named(text):
    with pytest.raises(ValueError, match="delay"):
        parse_delay(text)


@pytest.mark.parametrize("link", [(0.0, 0.0), (float("inf"), 0.0), (1e6, -1.0), (None, float("nan"))])
def test_a_link_is_checked_when_it_is_built(link):
    with pytest.raises(ValueError, match="must"):
        EmulatedLink(*link)


def test_counters_are_subtracted_field_by_field():
    assert Counters(rx_bytes=10, tx_bytes=7) - Counters(rx_bytes=4, tx_bytes=5) == Counters(6, 2)
