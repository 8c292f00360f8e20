"""Ring all-reduce of compressed frames, whose lengths depend on their contents.

The ring of Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
with a codec in every hop, as in GComp (Li et al. 2024, section 6.2). In the first N − 1 hops every rank
decodes the partition that arrives, adds its own part and encodes the sum. In the next N − 1 hops the finished
frames go around unchanged. Rank r sends partition (r − h) mod N in hop h, and finishes partition (r + 1) mod
N.

Vocabulary: a *partition* is one rank's share of the unit, a *segment* a piece of a partition, a *message* a
segment in one hop. Messages have numbers: hop · segments + segment.

Differences from the paper: the owner of a finished partition applies the decoded frame, as all other ranks
do. Partitions are cut into segments (GComp's blocks, section 6.2), so that one is decoded, added to and
encoded while others travel.

Lengths: gloo must know the size of a message before it arrives, and every message of a few bytes costs a rank
a third of a millisecond of CPU time and of waiting. So the length of a frame travels in the *trailer* of the
message that is two ahead of it; only the first two lengths have a message of their own. With one segment per
partition the next frame is not made yet, so each length has its own message. A length is accepted up to the
bound that follows from the frame's number of elements. A rank that cannot make a frame sends an empty one, of
length zero, which is passed on like any frame. So all messages take place whatever fails, and the failure is
raised at the end. A rank that fails before the first message owes zeros, which mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from gradwire.comm.base import Pending, Round
from gradwire.errors import TransportError, WireError

TRAILER_BYTES = 8
FEWEST = 4
"""Fewest segments of a partition, if it has several: one is encoded or decoded while two are on the wire."""


class Framing(Protocol):
    """Encoder and decoder for the frames of one unit in one step. A frame holds elements [start, start +
    numel).

    `hop` is the hop in which a frame was made, and so the number of additions in its values.
    """

    def bound(self, numel: int) -> int:
        """Bytes of the largest frame of `numel` elements, a multiple of 8."""

    def encode(self, x: Tensor, start: int, hop: int, room: Tensor) -> int:
        """Encode x (numel,), elements [start, start + numel) of the unit, into uint8 `room`, which has
        `bound(numel)` bytes or more.

        Returns the number of bytes, at least 8 and a multiple of 8.
        """

    def round_trip(self, x: Tensor, start: int) -> None:
        """Replace x (numel,), elements [start, start + numel) of the unit, by the decoded values of its
        frame.
        """

    def decode(self, data: Tensor, out: Tensor, start: int, hop: int, add: bool) -> None:
        """Decode the frame `data` of elements [start, start + numel), made in hop `hop`, into `out` (numel,).

        With `add` the values are added to `out`. Raises `WireError` if the frame is damaged or another one.
        """


class Neighbours(Protocol):
    """The methods of `Comm` that a ring uses."""

    @property
    def rank(self) -> int: ...
    def shift(self, out: Tensor, tensor: Tensor, by: int = 1, tells: int = 0) -> Pending: ...


@dataclass(frozen=True)
class RingSchedule:
    """The schedule of a ring: `numel` elements, `world` ranks, segments of at most `segment` elements.

    Partitions and segments are as equal as can be, and may be empty.

    >>> schedule = RingSchedule(numel=16, world=2, segment=4)
    >>> schedule.segments, [schedule.place(p, s) for p in range(2) for s in range(schedule.segments)]
    (4, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 14), (14, 16)])
    """

    numel: int
    world: int
    segment: int

    @cached_property
    def segments(self) -> int:
        """Number of segments per partition: one, or at least `FEWEST`."""
        pieces = -(-self.longest_partition // self.segment)
        return 1 if pieces <= 1 else max(FEWEST, pieces)

    @property
    def longest_partition(self) -> int:
        return -(-self.numel // self.world)

    @property
    def longest_segment(self) -> int:
        return -(-self.longest_partition // self.segments)

    @cached_property
    def messages(self) -> int:
        """Number of messages that a rank sends in the whole all-reduce."""
        return 2 * (self.world - 1) * self.segments

    @property
    def lead(self) -> int:
        """Number of messages by which a frame is encoded ahead, so that the current message's trailer can
        carry its length.

        It is 0 with one segment, because the next frame then depends on the message that arrives now.
        """
        return 0 if self.segments == 1 else 2

    def made(self, message: int) -> Sequence[int]:
        """Messages whose frames are encoded before `message` is sent."""
        return range(0 if message == 0 else message + self.lead, min(message + self.lead + 1, self.messages))

    def told(self, message: int) -> Sequence[int]:
        """Messages whose lengths are sent, in a message of their own, before `message`."""
        if self.lead == 0:
            return (message,)
        return range(self.lead) if message == 0 else ()

    def tells(self, message: int) -> int:
        """1 if the trailer of `message` carries a later length, else 0."""
        return int(0 < self.lead < self.messages - message)

    def place(self, partition: int, segment: int) -> tuple[int, int]:
        """Elements [start, stop) of a segment of a partition."""
        first, end = (index * self.numel // self.world for index in (partition, partition + 1))
        start, stop = (first + index * (end - first) // self.segments for index in (segment, segment + 1))
        return start, stop

    def sent(self, message: int, rank: int) -> tuple[int, int]:
        """Elements [start, stop) that `rank` sends in a message."""
        hop, segment = divmod(message, self.segments)
        return self.place((rank - hop) % self.world, segment)

    def received(self, message: int, rank: int) -> tuple[int, int]:
        """Elements [start, stop) that `rank` receives in a message."""
        return self.sent(message, (rank - 1) % self.world)

    def rounds(self, bound: int) -> tuple[Round, ...]:
        """The collectives, with frames of at most `bound` bytes."""
        frames = [
            Round("shift", bound + TRAILER_BYTES, torch.uint8, at_most=True, least=TRAILER_BYTES, tells=tells)
            for tells in (0, 1)
        ]
        if self.lead == 0:
            return (Round("shift", 1, torch.int64, tells=1), frames[0]) * self.messages
        last = min(self.lead, self.messages)
        told = (Round("shift", self.lead, torch.int64, tells=self.lead),) if self.messages else ()
        return (*told, *(frames[1],) * (self.messages - last), *(frames[0],) * last)


@dataclass
class Message:
    """A message in flight: memory `room` for the frame that arrives, of `length` bytes, and its trailer; and
    the frame `sent`.
    """

    room: Tensor
    length: int
    sent: Tensor
    pending: Pending
    landed: bool = False
    is_damaged: bool = False

    @property
    def frame(self) -> Tensor:
        """The frame that arrived, without its trailer; empty if it is damaged."""
        return self.room[: 0 if self.is_damaged else self.length]


class RingAllReduce:
    """An all-reduce in flight on one rank.

    `data` (numel,) holds this rank's addend at first, and the sum after `finish`. No failure of the framing
    is raised before: `failures` collects this rank's. `is_lost` is True if any rank had one, so that parts of
    the sum are NaN.
    """

    def __init__(self, data: Tensor, framing: Framing, comm: Neighbours, schedule: RingSchedule) -> None:
        self.failures: list[BaseException] = []
        self.is_lost = False
        self._data, self._framing, self._comm, self._schedule = data, framing, comm, schedule
        self._bound = framing.bound(schedule.longest_segment)
        self._made: dict[int, tuple[Tensor, int]] = {}
        self._in_flight: dict[int, Message] = {}
        self._lengths: dict[int, int] = {}

    def start(self) -> None:
        """Issue all messages; those of the last hop stay in flight."""
        for message in range(self._schedule.messages):
            for later in self._schedule.made(message):
                self._make(later)
            if told := self._schedule.told(message):
                self._tell(told)
            self._send(message)

    def finish(self) -> None:
        """Wait for the last hop and decode it."""
        for message in range(self._schedule.messages - self._schedule.segments, self._schedule.messages):
            self._read(message, self._arrived(message).frame)

    def _make(self, message: int) -> None:
        """Encode the frame of a message: this rank's own part, or a sum with it; a finished frame is passed
        on unchanged.
        """
        schedule, hop = self._schedule, message // self._schedule.segments
        if hop >= schedule.world:
            came = self._arrived(message - schedule.segments)
            self._made[message] = came.room, came.frame.numel()
            return
        start, stop = schedule.sent(message, self._comm.rank)
        part, made = self._data[start:stop], None
        if hop == 0 or self._decoded(
            self._arrived(message - schedule.segments).frame, part, start, hop - 1, add=True
        ):
            made = self._encoded(part, start, hop)
        if hop == schedule.world - 1:
            self._own(made is None, part, start)
        self._made[message] = made or (torch.zeros(TRAILER_BYTES, dtype=torch.uint8, device="cpu"), 0)

    def _tell(self, messages: Sequence[int]) -> None:
        """Exchange the lengths of the messages with these numbers, which travel alone because no earlier
        frame carries them: one shift of int64.
        """
        sent = torch.tensor([self._made[message][1] for message in messages], device="cpu")
        received = torch.empty_like(sent)
        self._comm.shift(received, sent, tells=len(messages)).wait()
        self._lengths |= zip(messages, received.tolist(), strict=True)

    def _send(self, message: int) -> None:
        """Exchange the frames of a message. A finished frame is decoded while it is passed on."""
        length = self._length(message)
        frame, own_length = self._made.pop(message)
        _room, later_length = self._made.get(message + self._schedule.lead, (frame, 0))
        trailer = frame[own_length : own_length + TRAILER_BYTES].view(torch.int64)
        trailer[0] = later_length
        sent = frame[: own_length + TRAILER_BYTES]
        room = torch.empty(length + TRAILER_BYTES, dtype=torch.uint8, device="cpu")
        pending = self._comm.shift(room, sent, tells=self._schedule.tells(message))
        self._in_flight[message] = Message(room, length, sent, pending)
        if message // self._schedule.segments >= self._schedule.world:
            self._read(message - self._schedule.segments, frame[:own_length])

    def _length(self, message: int) -> int:
        """Bytes of the frame that arrives with a message."""
        if message not in self._lengths:
            self._land(message - self._schedule.lead)
        length = self._lengths.pop(message)
        if not 0 <= length <= self._bound or length % 8:
            # The message in flight cannot be received, so the order is lost.
            raise TransportError(f"a peer announces {length} bytes, outside 0 … {self._bound}")
        return length

    def _land(self, message: int) -> Message:
        """Wait for a message, and read the length in its trailer."""
        arriving = self._in_flight[message]
        if not arriving.landed:
            try:
                arriving.pending.wait()
            except WireError as error:  # of a comm that checks; the trailer is right all the same
                self._fail(error)
                arriving.is_damaged = True
            arriving.landed = True
            self._lengths[message + self._schedule.lead] = int(
                arriving.room[arriving.length :].view(torch.int64)
            )
        return arriving

    def _arrived(self, message: int) -> Message:
        """Wait for a message, and remove it from those in flight."""
        self._land(message)
        return self._in_flight.pop(message)

    def _encoded(self, part: Tensor, start: int, hop: int) -> tuple[Tensor, int] | None:
        try:
            room = torch.empty(self._bound + TRAILER_BYTES, dtype=torch.uint8, device="cpu")
            return room, self._framing.encode(part, start, hop, room)
        except BaseException as error:
            self._fail(error)
            return None

    def _own(self, is_lost: bool, part: Tensor, start: int) -> None:
        """Let the owner of a finished segment, `part` from element `start` on, apply the decoded frame, as
        all other ranks will. If the frame `is_lost`, the segment becomes NaN.
        """
        try:
            if is_lost:
                part.fill_(torch.nan)
            else:
                self._framing.round_trip(part, start)
        except BaseException as error:
            self._fail(error)

    def _read(self, message: int, data: Tensor) -> None:
        """Decode a finished segment into `data`; NaN if it is lost."""
        start, stop = self._schedule.received(message, self._comm.rank)
        part = self._data[start:stop]
        if not self._decoded(data, part, start, self._schedule.world - 1, add=False):
            part.fill_(torch.nan)

    def _decoded(self, data: Tensor, part: Tensor, start: int, hop: int, add: bool) -> bool:
        if data.numel() == 0:
            self.is_lost = True
            return False
        try:
            self._framing.decode(data, part, start, hop, add)
        except BaseException as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: BaseException) -> None:
        """Record `error`, to be raised at the end: peers wait for the remaining messages."""
        self.failures.append(error)
        self.is_lost = True
