"""Rates and times as people write them on a command line."""

from __future__ import annotations

import re

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[kmgt]?)(?:bit(?:/s|ps)?|bps)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>us|ms|s)")


def rate_bit_per_s(text: str) -> float:
    """Bits per second from `200mbit`, `1.5 Gbit/s`, `64kbps`. Raises `ValueError` for anything else.

    >>> rate_bit_per_s("1.5 Gbit/s")
    1500000000.0
    """
    match = _RATE.fullmatch(text.strip().lower())
    if match is None or "Bps" in text:  # bytes, where bits are expected
        raise ValueError(f"{text!r}: expected a number with kbit, mbit or gbit, such as 200mbit")
    return float(match["number"]) * _PREFIX[match["prefix"]]


def time_s(text: str) -> float:
    """Seconds from `5ms`, `250us`, `0.1s`. Raises `ValueError` for anything else.

    >>> time_s("250us")
    0.00025
    """
    match = _TIME.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r}: expected a number with us, ms or s, such as 5ms")
    return float(match["number"]) * _SECONDS[match["unit"]]
