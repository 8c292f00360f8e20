"""Receives posted ahead of their messages, so that a message takes one latency, not two.

gloo sends a message only to a rank that has announced its receive. Ranks that begin a round together announce
and send at the same time. The bytes leave when the announcement has arrived, after one latency, and arrive
after two. Steps of a training are alike, so the messages of the next round are known: each receive announces
the next one of its length. As many receives of one length are announced as were ever in flight at once.
(`int4` gathered among three ranks, 83,000 parameters at 50 Mbit/s and 20 ms one way: 109 ms per step if
receives are announced when they are due, 52 ms here.)

Messages of one length between two ranks have their own tag. So a receive announced ahead never gets a message
of another length: it waits for one of its own, possibly for ever. gloo cannot cancel it. gloo releases the
memory of a receive that nobody waits for, and must never get a message for it afterwards. So each attached
model has its own series of tags, and its announced receives can be dropped when it is gone.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from contextlib import suppress
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

LONGEST_BYTES = 2**20
"""The longest message whose receive is announced ahead. Longer ones take longer than latencies do."""
ROOM_BYTES = 2**24
"""Memory for all receives that a group has announced ahead, in bytes. When it is full, receives are announced
when they are due."""
_SHARE = 8
"""Number of lengths that may fill the memory. One length takes at most its share, so that later ones
get some."""
_FIRST_TAG = 16
"""The lowest tag of a receive that may be announced ahead. Others have lower ones."""
_SPAN = 2 * (LONGEST_BYTES + 1)
"""Number of tags in a series: two for each length."""
_MOST_SERIES = (2**31 - _FIRST_TAG) // _SPAN
"""Number of series that tags of 31 bits allow: 1023."""
_REMEMBERED = 1024
"""Number of lengths remembered, to recognise those that recur."""

_Key = tuple[int, int]
"""Source and tag."""


class _Announced:
    """Announced receives of one group, and the number of each length that were in flight at once.

    Shared by threads that issue messages of different kinds.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._works: dict[_Key, deque[tuple[Tensor, Any]]] = {}
        self._under_way: Counter[_Key] = Counter()
        self._most: dict[_Key, int] = {}
        self._left_bytes = ROOM_BYTES

    def take(self, key: _Key) -> tuple[Tensor, Any] | None:
        """Remove the oldest announced receive of `key`. Returns (buffer, work); `None` if there is none."""
        if not (works := self._works.get(key)):
            return None
        buffer, work = works.popleft()
        self._left_bytes += buffer.nbytes
        return buffer, work

    def keep(self, key: _Key, buffer: Tensor, work: Any) -> None:
        """Store a receive that has just been announced, for `take`.

        `buffer` (bytes,) is its memory, and `work` ends when the message is in it.
        """
        self._works.setdefault(key, deque()).append((buffer, work))
        self._left_bytes -= buffer.nbytes

    def begin(self, key: _Key, nbytes: int) -> int:
        """Count one more message in flight, of `nbytes`. Returns how many further receives to announce.

        The first message of a key announces none.
        """
        self._under_way[key] += 1
        if len(self._most) >= _REMEMBERED:  # most likely of lengths that vary, and seldom come again
            self._most.clear()
        before, self._most[key] = key in self._most, max(self._under_way[key], self._most.get(key, 0))
        if not before:
            return 0
        most = min(self._most[key], max(1, ROOM_BYTES // _SHARE // max(nbytes, 1)))
        return min(most - len(self._works.get(key, ())), self._left_bytes // max(nbytes, 1))

    def end(self, key: _Key) -> None:
        """Count one message less in flight: it has arrived or failed."""
        self._under_way[key] -= 1
        if not self._under_way[key]:  # lengths that vary would fill it
            del self._under_way[key]


class ReceiveSeries:
    """Receives announced ahead by one attached model, under a `number` that is the same on all ranks.

    No other model on these ranks has had that number (`last`).
    """

    last: ClassVar[int] = -1
    """The highest number so far in this process."""

    def __init__(self, number: int) -> None:
        ReceiveSeries.last = max(ReceiveSeries.last, number)
        self._first_tag = _FIRST_TAG + number * _SPAN
        self._announced: WeakKeyDictionary[dist.ProcessGroup, _Announced] = WeakKeyDictionary()

    @staticmethod
    def after(last: int) -> ReceiveSeries | None:
        """The next series, where `last` is the highest number of any rank; `None` when tags are used up."""
        return ReceiveSeries(last + 1) if last + 1 < _MOST_SERIES else None

    def tag_of(self, message: Tensor, tag: int) -> int:
        """The tag of `message`, where others of its kind have `tag`: 0 or 1."""
        return tag if message.nbytes > LONGEST_BYTES else self._first_tag + 2 * message.nbytes + tag

    def over(self, group: dist.ProcessGroup) -> _Announced:
        """Receives that are announced over `group`."""
        return self._announced.setdefault(group, _Announced())

    def end(self) -> None:
        """Let go of all that is announced. Every message of the series has been received, and none is sent
        any more."""
        self._announced.clear()

    def keep(self) -> None:
        """Hold receives that are announced while their groups live: messages may come after a failure."""
        _KEPT.append(self._announced)


_KEPT: list[WeakKeyDictionary[dist.ProcessGroup, _Announced]] = []
"""Announced receives of models whose last step failed."""


class Receive:
    """A receive into `out` of a message with `tag` from rank `source`.

    It uses the first announced receive, or a new one. If such messages have come before, as many are
    announced as were ever in flight together.
    """

    def __init__(
        self, series: ReceiveSeries, group: dist.ProcessGroup, out: Tensor, source: int, tag: int
    ) -> None:
        self._out, self._buffer, self._key = out, None, (source, tag)
        self._is_under_way = True
        self._announced = announced = series.over(group)
        with announced.lock:
            if known := announced.take(self._key):
                self._buffer, self._work = known
            else:
                self._work = dist.irecv(out, group=group, group_src=source, tag=tag)
            for _ in range(announced.begin(self._key, out.nbytes)):
                buffer = torch.empty(out.nbytes, dtype=torch.uint8, device="cpu")
                # The peer may have sent its last message, which is here, and have gone.
                with suppress(RuntimeError):
                    work = dist.irecv(buffer, group=group, group_src=source, tag=tag)
                    announced.keep(self._key, buffer, work)

    def wait(self) -> None:
        """Block until the message is in `out`. It may be called again."""
        try:
            self._work.wait()
        finally:
            if self._is_under_way:
                self._is_under_way = False
                with self._announced.lock:
                    self._announced.end(self._key)
        if self._buffer is not None:
            self._out.view(-1).view(torch.uint8).copy_(self._buffer)
            self._buffer = None
