"""Rates, times, sizes and tables as people write and read them."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence

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


_COUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[kmbg]?)")


def count_of(text: str) -> int:
    """A number of parameters from `350M`, `7B`, `1.5b`. Raises `ValueError` for anything else.

    >>> count_of("1.5B")
    1500000000
    """
    match = _COUNT.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r}: expected a number of parameters, such as 350M or 7B")
    return round(float(match["number"]) * {**_PREFIX, "b": 1e9}[match["prefix"]])


def bytes_text(size_bytes: float) -> str:
    """A size in decimal units, as links are rated.

    >>> bytes_text(44_700_000), bytes_text(999_600), bytes_text(812)
    ('44.7 MB', '1 MB', '812 B')
    """
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= 0.9995 * factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def ms_text(seconds: float, digits: int = 0) -> str:
    """A time in milliseconds, from 100 seconds on in seconds.

    >>> ms_text(0.3964), ms_text(0.3964, digits=1), ms_text(874.475)
    ('396 ms', '396.4 ms', '874 s')
    """
    if seconds >= 99.9995:
        return f"{seconds:.0f} s"
    return f"{seconds * 1e3:.{digits}f} ms"


def counted(number: int, noun: str) -> str:
    """Text of a number of things.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def columns() -> int:
    """The width of the terminal, or what `COLUMNS` says; 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns


def wrapped(text: str, width: int, indent: str = "", hanging: str | None = None) -> str:
    """`text` in lines of at most `width`, the first after `indent`, the others after `hanging`.

    Words stay whole, however narrow it is.

    >>> print(wrapped("int4(block=128) is fast enough", 16, "why  ", "     "))
    why  int4(block=128)
         is fast
         enough
    """
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def titled(told: Sequence[str], width: int) -> str:
    """A title, and below it sentences that are indented, all in lines of at most `width`.

    >>> print(titled(["predicted", "not measured"], 40))
    predicted
      not measured
    """
    return "\n".join(wrapped(text, width, "  " if number else "", "    ") for number, text in enumerate(told))


def table_text(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, left: Sequence[int] = (0,)
) -> str:
    """Format a table in lines of at most `width` characters; the first column is wrapped where it would be
    wider.

    Other columns stay whole. `head` has the columns' names, and each of `rows` as many cells. Columns in
    `left`, by number, are aligned to the left, as words are, and others to the right.

    >>> print(table_text(("recipe", "step"), [("int8", "396 ms"), ("topk(ratio=0.01)", "186 ms")], 40))
    recipe              step
    int8              396 ms
    topk(ratio=0.01)  186 ms
    """
    wide = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    if width is not None:
        wide[0] = min(wide[0], max(width - sum(wide[1:]) - 2 * len(wide[1:]), 1))

    def padded(column: int, cell: str) -> str:
        return cell.ljust(wide[column]) if column in left else cell.rstrip().rjust(wide[column])

    lines = []
    for first, *others in (head, *rows):
        first, *more = textwrap.wrap(first, wide[0], break_on_hyphens=False) or [""]
        lines += ["  ".join(padded(*each) for each in enumerate((first, *others))), *more]
    return "\n".join(line.rstrip() for line in lines)
