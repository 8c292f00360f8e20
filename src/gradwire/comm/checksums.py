"""A `Comm` around a `Comm` that detects damaged bytes. Exchanges are unaware of it.

TCP's own checksum has 16 bits, and memory and network cards err, too. Here every message carries a checksum
(XXH64) of its bytes, its sender and the number of its round, so that misplaced messages are detected as well.
A sum cannot be checked from end to end, so all-reduces use gradwire's own hops, and each hop is checked.

Consequences of damage:

- *Short* messages (`SHORT_BYTES`) are sent twice, each copy with its checksum; one sound copy is enough. All
  messages that decide the course of a step are short: counts, leaders, the status vote. Longer rows that
  ranks agree on are sent in short pieces (`gradwire.comm.gathered`). If the last words of a long message tell
  later lengths (`Round.tells`), these words are sent twice.
- Damage of a long message in a gather, an all-to-all or a shift is known to its receiver only. `wait` raises
  `WireError` there, and the status vote of the step tells all others. Lengths are as announced, so the order
  of messages stays intact.
- All-reduces and broadcasts end alike on all ranks, because no later message may tell the others. After the
  hops, ranks agree by short messages whether one of them has found damage. `wait` raises `WireError` on that
  rank and `PeerFailed` on the others.

Rounds and meters count payloads; `overhead_bytes` counts checksums and second copies.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.comm.algorithms import (
    Collective,
    Peers,
    PointToPointComm,
    collective_of,
    strides,
    swap_all_reduce,
)
from gradwire.comm.base import DONE, SHORT_BYTES, Comm, Finishing, Pending, Round
from gradwire.errors import PeerFailed, WireError
from gradwire.kernels.frames import checksum

_LOG = logging.getLogger("gradwire")

_CHECK = struct.Struct("<Q")
_SPREAD = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio; a multiplication by it changes many bits."""


@dataclass(frozen=True)
class SealedLayout:
    """The layout of a message: a payload of `payload_bytes` with its checksums.

    If it is long, its last `told_bytes` travel twice. Every copy is filled up with zeros to a multiple of 8
    bytes, and its checksum follows.

    >>> SealedLayout(5).bytes, SealedLayout(5000).bytes, SealedLayout(5008, told_bytes=8).bytes
    (32, 5008, 5040)
    """

    payload_bytes: int
    told_bytes: int = 0

    @property
    def bytes(self) -> int:
        """The length of the message."""
        return sum(copies * (_filled(stop - start) + _CHECK.size) for start, stop, copies in self._parts())

    def _parts(self) -> tuple[tuple[int, int, int], ...]:
        """Begin, end and number of copies of each part of the payload."""
        whole, border = self.payload_bytes, self.payload_bytes - self.told_bytes
        if whole <= SHORT_BYTES:
            return ((0, whole, 2),)
        return ((0, border, 1), (border, whole, 2)) if self.told_bytes else ((0, whole, 1),)

    def _copies(self, message: Tensor) -> Iterator[tuple[slice, list[tuple[Tensor, memoryview]]]]:
        """Each part of the payload, and its copies in `message`, each with the room of its checksum."""
        memory, at = message.numpy().data, 0
        for start, stop, copies in self._parts():
            size, places = _filled(stop - start), []
            for _copy in range(copies):
                behind = at + size
                places.append((message[at:behind], memory[behind : behind + _CHECK.size]))
                at = behind + _CHECK.size
            yield slice(start, stop), places

    def seal(self, payload: Tensor, mark: int, message: Tensor) -> Tensor:
        """Write `payload` (payload_bytes,) into `message` (bytes,), both uint8; returns the latter."""
        for part, copies in self._copies(message):
            size = part.stop - part.start
            for copy, check in copies:
                copy[:size] = payload[part]
                copy[size:] = 0
                _CHECK.pack_into(check, 0, checksum(copy) ^ mark)
        return message

    def open(self, message: Tensor, mark: int, payload: Tensor) -> tuple[bool, bool]:
        """Write the content of `message` to `payload`. Returns (is the content sound, are all copies
        sound).
        """
        is_right = is_whole = True
        for part, copies in self._copies(message):
            sound = [copy for copy, check in copies if _CHECK.unpack(check)[0] == checksum(copy) ^ mark]
            payload[part] = (sound or [copies[0][0]])[0][: part.stop - part.start]
            is_right, is_whole = is_right and bool(sound), is_whole and len(sound) == len(copies)
        return is_right, is_whole


def _filled(size: int) -> int:
    """The next multiple of 8."""
    return -(-size // 8) * 8


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@dataclass
class Watchman:
    """One round on this rank: seals outgoing messages, opens incoming ones, and keeps the first `damage`.

    Errors call ranks by their `names`.
    """

    round: Round
    number: int
    rank: int
    names: Sequence[int]
    damage: WireError | PeerFailed | None = None

    def _mark(self, sender: int) -> int:
        return ((self.number << 20) + sender) * _SPREAD % 2**64

    def sealed(self, payload: Tensor, tells: int = 0) -> Tensor:
        """`payload` with its checksums, as a uint8 message. Its last `tells` int64 are in it twice."""
        how = SealedLayout(payload.nbytes, 8 * tells)
        return how.seal(
            _raw(payload), self._mark(self.rank), torch.empty(how.bytes, dtype=torch.uint8, device="cpu")
        )

    def room(self, payload: Tensor, tells: int = 0) -> Tensor:
        """A buffer for a message whose content will fill `payload`."""
        return torch.empty(SealedLayout(payload.nbytes, 8 * tells).bytes, dtype=torch.uint8, device="cpu")

    def open(self, message: Tensor, sender: int, payload: Tensor, tells: int = 0) -> None:
        """Check the `message` (bytes,) uint8 from `sender`, and copy its content to `payload`.

        Content that is damaged in all copies is copied, too, and recorded in `damage`. Damage in one copy of
        several is logged only.

        Args:
            tells: as in the sender's `sealed`.
        """
        is_right, is_whole = SealedLayout(payload.nbytes, 8 * tells).open(
            message, self._mark(sender), _raw(payload)
        )
        if not is_right:
            self.damage = self.damage or WireError(
                f"rank {self.names[self.rank]} received damaged bytes from rank {self.names[sender]}: {self}"
            )
        elif not is_whole:
            _LOG.warning(
                "rank %d received damaged bytes from rank %d, and a second copy of them: %s",
                self.names[self.rank],
                self.names[sender],
                self,
            )

    def hear(self, rank: int) -> None:
        """Note that `rank` has found damage; below 0 none has."""
        if rank >= 0 and self.damage is None:
            self.damage = PeerFailed(f"rank {self.names[rank]} received damaged bytes: {self}")

    def __str__(self) -> str:
        numel, dtype = self.round.numel, str(self.round.dtype).removeprefix("torch.")
        return f"round {self.number}, {self.round.name} of {numel} {dtype}"


class CheckedComm(Comm):
    """Wraps the comm of one attached model. On a single rank it checks nothing, as nothing travels."""

    verifies = True

    def __init__(self, inner: PointToPointComm, names: Sequence[int] | None = None) -> None:
        """`names` are the ranks' numbers in errors, where they have others among all ranks of the model."""
        self._names = range(inner.world) if names is None else names
        self.rank, self.world, self.connections = inner.rank, inner.world, inner.connections
        self._inner, self._number = inner, 0
        checksum(torch.zeros(0, dtype=torch.uint8, device="cpu"))  # compiled now, while no step is waited for

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """See `Comm.issue`; `wait` raises as the module says. `out` holds what came even then."""
        to_itself = round_.verb == "shift" and round_.by % self.world == 0
        if self.world == 1 or to_itself:
            return self._inner.issue(round_, tensor, out)
        watch = Watchman(round_, self._number + 1, self.rank, self._names)
        match round_.verb:
            case "all_reduce" | "broadcast":
                pending = self._hop(watch, tensor)
            case "shift":
                pending = self._shift(watch, tensor, out)
            case _:
                pending = self._rows(watch, tensor, out)
        self._number += 1  # not where nothing was sent: another round then has that number on all ranks
        return pending

    def _rows(self, watch: Watchman, tensor: Tensor, out: Tensor) -> Pending:
        """All-gather or all-to-all of `tensor` into `out`, as a row with its checksums from every rank;
        `watch` opens them.
        """
        gathers = watch.round.verb == "all_gather"
        rows = [tensor] if gathers else list(tensor.view(self.world, -1))
        sent = torch.stack([watch.sealed(row) for row in rows])
        came = sent.new_empty(self.world, sent.shape[1])
        received = out.view(self.world, -1)

        def opened() -> None:
            received[self.rank] = rows[0 if gathers else self.rank]
            for rank, (message, row) in enumerate(zip(came, received, strict=True)):
                if rank != self.rank:
                    watch.open(message, rank, row)

        return self._arrival(watch, sent.view(-1) if gathers else sent, came, opened)

    def _shift(self, watch: Watchman, tensor: Tensor, out: Tensor) -> Pending:
        tells, source = watch.round.tells, (self.rank - watch.round.by) % self.world
        came = watch.room(out, tells)
        return self._arrival(
            watch, watch.sealed(tensor, tells), came, lambda: watch.open(came, source, out, tells)
        )

    def _arrival(self, watch: Watchman, sent: Tensor, came: Tensor, opened: Callable[[], None]) -> Pending:
        """Issue the round of `watch` with sealed messages.

        Args:
            sent: the messages of this rank.
            came: memory for the messages that arrive.
            opened: checks and opens these, and is called when they are there.

        Returns a pending; its `wait` raises if messages were damaged.
        """
        sealed = replace(watch.round, numel=sent.numel(), dtype=sent.dtype)
        self.overhead_bytes += sealed.wire_bytes(self.world) - watch.round.wire_bytes(self.world)
        return Judged(watch, self._inner.issue(sealed, sent, came), opened)

    def _hop(self, watch: Watchman, tensor: Tensor) -> Pending:
        peers: list[CheckedPeers] = []
        collective = self._way(watch.round, tensor)

        def checked(messages: Peers) -> None:
            peers.append(here := CheckedPeers(messages, watch))
            collective(here)
            if watch.round.payload_bytes > SHORT_BYTES:
                here.agree()

        def ended() -> None:
            [here] = peers
            self.overhead_bytes += here.overhead_bytes

        return Judged(watch, self._inner.hop(checked), ended)

    def _way(self, round_: Round, tensor: Tensor) -> Collective:
        """The algorithm: hops of our own, whatever the library would do."""
        if round_.algorithm != "library":
            return collective_of(round_, tensor)
        if round_.verb == "broadcast":
            return collective_of(replace(round_, algorithm="scatter"), tensor)
        if self.world == 2:
            return lambda peers: swap_all_reduce(tensor, peers)
        return collective_of(replace(round_, algorithm="ring"), tensor)


class Judged(Finishing):
    """A whole round, whose `wait` raises the damage found by its watchman."""

    def __init__(self, watch: Watchman, coming: Pending, opened: Callable[[], None]) -> None:
        super().__init__(coming, opened)
        self._watch = watch

    def wait(self) -> None:
        """Block until the round has ended, and open what has come; raises for damage."""
        super().wait()
        if self._watch.damage is not None:
            raise self._watch.damage


class CheckedPeers:
    """The other ranks, for one collective; see `gradwire.comm.algorithms.Peers`.

    A damaged message is handed on all the same, because others wait for it.
    """

    def __init__(self, peers: Peers, watch: Watchman) -> None:
        self.rank, self.world = peers.rank, peers.world
        self.overhead_bytes = 0
        self._peers, self._watch = peers, watch

    def send(self, tensor: Tensor, target: int) -> Pending:
        if tensor.numel() == 0:
            return DONE
        message = self._watch.sealed(tensor)
        self.overhead_bytes += message.nbytes - tensor.nbytes
        return self._peers.send(message, target)

    def receive(self, out: Tensor, source: int) -> Pending:
        if out.numel() == 0:
            return DONE
        message = self._watch.room(out)
        return Finishing(self._peers.receive(message, source), lambda: self._watch.open(message, source, out))

    def agree(self) -> None:
        """Find out whether any rank has received damaged bytes, and record it in the `Watchman` as damage.
        Raises nothing for damage. A collective: ⌈log2 N⌉ hops of 8 bytes and their checksums.
        """
        worst = torch.tensor([0 if self._watch.damage is None else self.rank + 1], device="cpu")
        for by in strides(self.world):
            other = torch.empty_like(worst)
            came = self.receive(other, (self.rank - by) % self.world)
            sent = self.send(worst, (self.rank + by) % self.world)
            came.wait()
            sent.wait()
            self.overhead_bytes += worst.nbytes  # is no payload, either
            worst = torch.maximum(worst, other)
        self._watch.hear(int(worst) - 1)
