"""Ring all-reduce of frames whose lengths follow from what is in them.

The ring of Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
with a codec in every hop, as in GComp (Li et al. 2024, section 6.2): N − 1 hops in which a partition of the
unit goes around and every rank decodes it, adds its own part and encodes the sum, then N − 1 hops in which
the finished frames go around unchanged. Rank r sends partition (r − h) mod N in hop h, and finishes partition
(r + 1) mod N.

Vocabulary: a *partition* is one rank's share of the unit, a *segment* a piece of a partition, a *message* a
segment in one hop. Messages have numbers: hop · segments + segment.

Differences from the paper: the owner of a finished partition uses what its frame says, as all others do;
partitions are cut into segments, so that one is decoded, added to and encoded while others travel.

Lengths: gloo must know the size of what it is to receive. Each message is preceded by its length, which is
sent before the frame of the message ahead of it, so that nobody waits for a length while a frame could
travel. A length is believed up to the bound that the frame's number of elements gives. A rank that cannot
make a frame sends a single byte instead, which no frame is, and that is passed on like a frame: all messages
take place whatever fails, and the failure is raised at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradwire.comm.base import Pending, Round
from gradwire.errors import TransportError

MARKER_BYTES = 1
"""Of what stands for a frame that could not be made; frames are longer."""


class Framing(Protocol):
    """From values to bytes and back, for the elements [start, start + numel) of one unit in one step.

    `hop` is that in which the frame was made: the number of sums that are in it.
    """

    def bound(self, numel: int) -> int:
        """Bytes of the largest frame of `numel` elements."""

    def encode(self, x: Tensor, start: int, hop: int) -> Tensor:
        """x (numel,) as bytes, more than one."""

    def settle(self, x: Tensor, start: int) -> None:
        """Replace x (numel,) by what its frame says of it."""

    def decode(self, data: Tensor, out: Tensor, start: int, hop: int, add: bool) -> None:
        """Write what `data` says to `out` (numel,), or add it; raises `WireError`."""


class Neighbours(Protocol):
    """The part of `Comm` that a ring needs."""

    @property
    def rank(self) -> int: ...
    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Pending: ...


@dataclass(frozen=True)
class Course:
    """Who sends what when: `numel` elements in a ring of `world` ranks, segments of about `segment` elements.

    Partitions and segments are as equal as can be, and may be empty.

    >>> course = Course(numel=10, world=3, segment=2)
    >>> course.segments, [course.place(p, s) for p in range(3) for s in range(course.segments)]
    (2, [(0, 1), (1, 3), (3, 4), (4, 6), (6, 8), (8, 10)])
    """

    numel: int
    world: int
    segment: int

    @property
    def segments(self) -> int:
        """Pieces of a partition."""
        return max(1, -(-self.longest_partition // self.segment))

    @property
    def longest_partition(self) -> int:
        """Elements."""
        return -(-self.numel // self.world)

    @property
    def longest_segment(self) -> int:
        """Elements."""
        return -(-self.longest_partition // self.segments)

    @property
    def messages(self) -> int:
        """Of a whole all-reduce."""
        return 2 * (self.world - 1) * self.segments

    @property
    def ahead(self) -> int:
        """Messages that are encoded, and their lengths sent, before the frame of one leaves.

        Where there is one segment the next message needs what comes with this one.
        """
        return min(1, self.segments - 1)

    def place(self, partition: int, segment: int) -> tuple[int, int]:
        """The elements [start, stop) of a segment."""
        first, end = (index * self.numel // self.world for index in (partition, partition + 1))
        start, stop = (first + index * (end - first) // self.segments for index in (segment, segment + 1))
        return start, stop

    def sent(self, message: int, rank: int) -> tuple[int, int]:
        """The elements that `rank` sends in a message."""
        hop, segment = divmod(message, self.segments)
        return self.place((rank - hop) % self.world, segment)

    def received(self, message: int, rank: int) -> tuple[int, int]:
        """The elements that `rank` receives in a message."""
        return self.sent(message, (rank - 1) % self.world)

    def rounds(self, bound: int) -> tuple[Round, ...]:
        """The collectives, with frames of up to `bound` bytes."""
        length, frame = Round("shift", 1, torch.int64), Round("shift", bound, torch.uint8, at_most=True)
        return tuple(length if is_length else frame for is_length, _message in self.order())

    def order(self) -> Iterator[tuple[bool, int]]:
        """Lengths (true) and frames (false) of messages, in the order in which they are issued."""
        for message in range(self.messages + self.ahead):
            if message < self.messages:
                yield True, message
            if message >= self.ahead:
                yield False, message - self.ahead


class Lap:
    """An all-reduce under way on one rank.

    `data` (numel,) holds what this rank adds, and when `finish` has been called the sum. Afterwards
    `failures` are those of this rank, and `is_lost` says that some rank had one, so that parts of the sum are
    NaN. Nothing is raised but `TransportError`.
    """

    def __init__(self, data: Tensor, framing: Framing, comm: Neighbours, course: Course) -> None:
        self.failures: list[Exception] = []
        self.is_lost = False
        self._data, self._framing, self._comm, self._course = data, framing, comm, course
        self._bound = framing.bound(course.longest_segment)
        self._frames: dict[int, Tensor] = {}
        self._lengths: dict[int, tuple[Tensor, Tensor, Pending]] = {}
        self._arriving: dict[int, tuple[Tensor, Tensor, Pending]] = {}

    def start(self) -> None:
        """Issue all messages; those of the last hop stay in flight."""
        for is_length, message in self._course.order():
            if is_length:
                self._announce(message)
            else:
                self._send(message)

    def finish(self) -> None:
        """Take in the last hop."""
        for message in range(self._course.messages - self._course.segments, self._course.messages):
            self._read(message, self._arrived(message))

    def _announce(self, message: int) -> None:
        """Make the frame of a message, and tell its length."""
        frame = self._frames[message] = self._frame(message)
        told, heard = torch.tensor([frame.numel()]), torch.empty(1, dtype=torch.int64)
        self._lengths[message] = heard, told, self._comm.shift(heard, told)

    def _send(self, message: int) -> None:
        """Exchange the frames of a message. What the frame brings is read while it is passed on."""
        heard, _told, pending = self._lengths.pop(message)
        pending.wait()
        length, frame = int(heard), self._frames.pop(message)
        if not MARKER_BYTES <= length <= self._bound:
            # What is under way cannot be received, so that the order is lost.
            raise TransportError(f"a peer announces {length} bytes, outside {MARKER_BYTES} … {self._bound}")
        room = torch.empty(length, dtype=torch.uint8)
        self._arriving[message] = room, frame, self._comm.shift(room, frame)
        if message // self._course.segments >= self._course.world:
            self._read(message - self._course.segments, frame)

    def _arrived(self, message: int) -> Tensor:
        room, _frame, pending = self._arriving.pop(message)
        pending.wait()
        return room

    def _frame(self, message: int) -> Tensor:
        """What is to be sent: this rank's own part, a sum with it, or a finished frame as it came."""
        course, hop = self._course, message // self._course.segments
        if hop >= course.world:
            return self._arrived(message - course.segments)
        start, stop = course.sent(message, self._comm.rank)
        part = self._data[start:stop]
        frame = _marker()
        if hop == 0 or self._decoded(
            self._arrived(message - course.segments), part, start, hop - 1, add=True
        ):
            frame = self._encoded(part, start, hop)
        if hop == course.world - 1:
            self._own(frame, part, start)
        return frame

    def _encoded(self, part: Tensor, start: int, hop: int) -> Tensor:
        try:
            return self._framing.encode(part, start, hop)
        except Exception as error:
            self._fail(error)
            return _marker()

    def _own(self, frame: Tensor, part: Tensor, start: int) -> None:
        """The owner of a finished segment uses what its frame says, as all others will."""
        try:
            if _is_marker(frame):
                part.fill_(torch.nan)
            else:
                self._framing.settle(part, start)
        except Exception as error:
            self._fail(error)

    def _read(self, message: int, data: Tensor) -> None:
        """Take over a finished segment."""
        start, stop = self._course.received(message, self._comm.rank)
        part = self._data[start:stop]
        if not self._decoded(data, part, start, self._course.world - 1, add=False):
            part.fill_(torch.nan)

    def _decoded(self, data: Tensor, part: Tensor, start: int, hop: int, add: bool) -> bool:
        if _is_marker(data):
            self.is_lost = True
            return False
        try:
            self._framing.decode(data, part, start, hop, add)
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        """Keep it for the end: peers wait for the messages that are left."""
        self.failures.append(error)
        self.is_lost = True


def _marker() -> Tensor:
    return torch.zeros(MARKER_BYTES, dtype=torch.uint8)


def _is_marker(data: Tensor) -> bool:
    return data.numel() <= MARKER_BYTES
