"""Reader of torch.profiler's traces as a stream: one event at a time, whatever the size of the file.

A trace is a JSON object whose `traceEvents` are an array, or that array alone, as Chrome writes it. Text is
decoded in pieces; at most a piece and the event at its end are in memory.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from gradwire.quantities import counted

PIECE = 1 << 20
"""Characters that are decoded at once."""

_LONGEST = 16
"""Largest number of pieces in one value: in a damaged file, the end of a value is not searched any
further."""

# torch.profiler begins each event on a line of its own, with its phase.
_BEGINS = re.compile(r'\n[ \t]*\{\s*"ph"\s*:')
_WHITE = " \t\r\n"
_GZIP = b"\x1f\x8b"
# Names of kernels and stacks have been written with characters that JSON wants escaped.
_decode = json.JSONDecoder(strict=False).raw_decode

Event = dict[str, Any]


def read(path: Path, take: Callable[[Event], None], piece: int = PIECE) -> tuple[dict[str, Any], int]:
    """Give each event of a trace to `take`, in the order of the file.

    Events that are no JSON are left out. torch.profiler writes such ones: names are not escaped, so that a
    quote in the name of a file or function ends the text, and numbers may be "inf".

    Args:
        path: a file that `export_chrome_trace` or `tensorboard_trace_handler` has written, plain or in gzip's
            format.
        take: called with each event, which is a dictionary.
        piece: characters that are decoded at once.

    Returns:
        All other keys of the file, such as `distributedInfo`, and the number of events that were left out.

    Raises:
        ValueError: the file is empty, cut, damaged, no trace, or cannot be read. The message names it.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "trace.json"
        >>> _ = path.write_text('{"schemaVersion": 1, "traceEvents": [{"name": "a"}, {"name": "b"}]}')
        >>> read(path, lambda event: print(event["name"]))
        a
        b
        ({'schemaVersion': 1}, 0)
    """
    try:
        with path.open("rb") as binary:
            packed = binary.read(2) == _GZIP
        opened = gzip.open if packed else open
        with opened(path, "rt", encoding="utf-8") as file:
            reader = _Reader(file, take, piece)
            return reader.trace(), reader.invalid
    except EOFError as error:
        raise ValueError(f"{path}: it was cut: its compressed data end too early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: its compressed data are damaged: {error}") from error
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is no text, so no trace of torch.profiler") from error
    except RecursionError as error:
        raise ValueError(f"{path}: it is damaged: its values are nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _Reader:
    """A file, and the part of its text that is not yet decoded."""

    def __init__(self, file: TextIO, take: Callable[[Event], None], piece: int) -> None:
        self._file, self._take, self._piece = file, take, piece
        self._text, self._at, self._events, self.invalid = "", 0, 0, 0

    def trace(self) -> dict[str, Any]:
        first = self._next()
        if not first:
            raise ValueError("it is empty")
        if first == "[":
            self._array()
            return {}
        if first != "{":
            raise ValueError("it is no JSON, so no trace of torch.profiler")
        header: dict[str, Any] = {}
        found = False
        for _ in self._members("}"):
            name = self._value()
            if not isinstance(name, str) or self._next() != ":":
                raise self._damaged()
            self._at += 1
            if name == "traceEvents" and self._next() == "[":
                found = True
                self._array()
            else:
                header[name] = self._value()
        if not found:
            raise ValueError("it has no traceEvents, so it is no trace of torch.profiler")
        return header

    def _array(self) -> None:
        for _ in self._members("]"):
            event = self._value(in_events=True)
            if not isinstance(event, dict):
                raise self._damaged()
            self._events += 1
            self._take(event)

    def _members(self, closing: str) -> Iterator[None]:
        """Stop at the beginning of each member of an array or object, after its opening bracket."""
        self._at += 1
        if self._next() == closing:
            self._at += 1
            return
        while True:
            yield
            after = self._next()
            self._at += 1
            if after == closing:
                return
            if after != ",":
                raise self._damaged()

    def _next(self) -> str:
        """The next character that is not white; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _WHITE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self, *, in_events: bool = False) -> Any:
        """Decode the next value; with twice the text, if it ends beyond the decoded text.

        If one of the events is no JSON although the next one has begun, that is decoded in its place.
        """
        self._next()
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except json.JSONDecodeError:
                if in_events and (following := _BEGINS.search(self._text, self._at)):
                    self._at = following.start()
                    self._next()
                    self.invalid += 1
                    continue
                if len(self._text) - self._at > _LONGEST * self._piece or not self._more():
                    raise self._damaged() from None
                continue
            if end < len(self._text) or not self._more():
                self._at = end
                return value

    def _more(self) -> bool:
        """Decode as much text again as there is, at least a piece; returns False at the end of the file."""
        self._text, self._at = self._text[self._at :], 0
        read = self._file.read(max(self._piece, len(self._text)))
        self._text += read
        return bool(read)

    def _damaged(self) -> ValueError:
        return ValueError(f"it is cut or damaged after {counted(self._events, 'event')}")
