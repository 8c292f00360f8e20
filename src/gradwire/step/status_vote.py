"""The rows that ranks exchange at the end of a step, before anything is committed, and their all-reduce.

A table with one row per rank travels in the step's last all-reduce, with a few small dense gradients. Every
rank contributes its own row, and zeros elsewhere, so that the sum is the table itself, exactly. Small
gradients that are there early, or that are too many for an all-reduce of one latency, have one of their own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.comm import Pending, Round
from gradwire.comm.base import DONE, Algorithm, shortest_sum
from gradwire.errors import GradwireError, PeerFailed, RanksDisagree
from gradwire.kernels.dispatch import kernels_for
from gradwire.kernels.joined import join, split
from gradwire.kernels.range import is_finite
from gradwire.measure.metered import MeteredComm
from gradwire.planning.tuning import Tuning

HEADER = 5


def riding_bytes(world: int, tuning: Tuning) -> float:
    """The most bytes of small gradients that go out with the status vote; more have an all-reduce of their
    own.

    Among more than two ranks the vote uses an algorithm for few bytes (`shortest_sum`), which many bytes
    would slow down.

    Args:
        world: the number of ranks.
        tuning: has the limit.
    """
    return math.inf if shortest_sum(world) == "library" else tuning.riding_bytes


def fingerprint(*parts: object) -> int:
    """24 bits over `parts`, which must be equal on all ranks: exact in a float32."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=3).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class RankReport:
    """Row of one rank: its report on the step."""

    finite: bool
    failed: bool
    fingerprint: int
    facts: tuple[float, ...] = ()
    stale: bool = False
    """True if the model's buffers have changed since they were sent."""
    computing_s: float = 0.0
    """Seconds from the end of this rank's previous step to its last gradient of this step."""

    @property
    def width(self) -> int:
        return HEADER + len(self.facts)

    def write(self, table: Tensor, rank: int) -> None:
        """Put this row into `table` (world, HEADER + facts), float32, zero elsewhere."""
        values = [
            float(not self.finite),
            float(self.failed),
            float(self.fingerprint),
            float(self.stale),
            self.computing_s,
            *self.facts,
        ]
        table.zero_()
        table[rank] = table.new_tensor(values)


@dataclass(frozen=True)
class Votes:
    """Rows of all ranks."""

    rows: tuple[RankReport, ...]

    @classmethod
    def read(cls, table: Tensor) -> Votes:
        """Read the rows of a summed table."""
        rows = table.tolist()
        return cls(
            tuple(
                RankReport(row[0] == 0, row[1] != 0, int(row[2]), tuple(row[HEADER:]), row[3] != 0, row[4])
                for row in rows
            )
        )

    @property
    def finite(self) -> bool:
        """True if the gradients and memories of all ranks are finite."""
        return all(row.finite for row in self.rows)

    @property
    def stale(self) -> bool:
        """True if the model's buffers that were sent are out of date on some rank."""
        return any(row.stale for row in self.rows)

    def error(self) -> GradwireError | None:
        """The error with which the step fails on all ranks, or `None`."""
        fingerprints = [row.fingerprint for row in self.rows]
        if len(set(fingerprints)) > 1:
            return RanksDisagree(
                f"plan or step differ between ranks (fingerprints by rank: {fingerprints}). Was a state "
                "loaded on some ranks only, or from different steps?"
            )
        failed = [rank for rank, row in enumerate(self.rows) if row.failed]
        if failed:
            ranks = ", ".join(map(str, failed))
            return PeerFailed(
                f"rank {ranks} failed to encode or decode in this step; nothing was committed on any rank. "
                f"The traceback is on rank {ranks}."
            )
        return None


@lru_cache(maxsize=256)
def sum_bytes(numel: int, algorithm: Algorithm, world: int) -> float:
    """Bytes that a rank sends in a float32 all-reduce of `numel` elements by `algorithm` among `world` ranks.

    >>> sum_bytes(1000, "library", 4)
    6000.0
    """
    return Round("all_reduce", numel, torch.float32, algorithm=algorithm).wire_bytes(world)


class SmallReduce:
    """All-reduce of small dense gradients: regions times 1/W in one float32 buffer, summed over ranks.

    Types up to 32 bits are summed in float32, which is never less precise than DDP's own sum. With `mark`,
    the mark of this rank's step, the buffer has one number more: the sum is infinite if a rank's mark is set,
    or else 0. Then it has room for `room` further numbers.
    """

    def __init__(
        self,
        regions: list[Tensor],
        comm: MeteredComm,
        device: torch.device,
        room: int = 0,
        latency: float = 1.0,
        mark: Tensor | None = None,
    ) -> None:
        self._regions, self._kernels = regions, kernels_for(device, torch.float32)
        self._pending: Pending | None = None
        self.comm = comm
        numel = sum([region.numel() for region in regions])
        numel += mark is not None
        self.buffer = torch.empty(numel + room, dtype=torch.float32, device=device)
        self._flat = self.buffer[:numel]
        self.algorithm: Algorithm = shortest_sum(comm.world, self.buffer.nbytes, latency)
        self.wire_bytes = sum_bytes(self.buffer.numel(), self.algorithm, comm.world)
        """The predicted bytes on the wire."""
        self._kernels[join](regions, self._flat, 1.0 / comm.world, mark)

    def send(self, ended: Callable[[], None] = lambda: None) -> None:
        """Issue the all-reduce, and call `ended` at its end (`Pending.then`). Raises `TransportError`."""
        self._pending = self.comm.all_reduce(self.buffer, self.algorithm)
        self._pending.then(ended)

    def wait(self) -> None:
        """Block until the sum is there. Raises `TransportError` when the all-reduce failed."""
        assert self._pending is not None, "sent first"
        self._pending.wait()

    def is_finite(self) -> bool:
        """True if the mean of the small gradients is finite; the same answer on all ranks."""
        return is_finite(self._flat)

    def land(self, mark: Tensor | None = None) -> None:
        """Write the means to the buckets. `mark` is set if they are not finite, or if a rank's is set."""
        self._kernels[split](self._flat, self._regions, mark)


class StatusVote(SmallReduce):
    """The all-reduce of the remaining small gradients and the vote's table, with one row per rank.

    The table follows the gradients in one buffer. With `mark`, one number more travels between the two, so
    that the host does not read this rank's mark: see `SmallReduce`.
    """

    def __init__(
        self,
        regions: list[Tensor],
        row: RankReport,
        comm: MeteredComm,
        device: torch.device,
        mark: Tensor | None = None,
    ) -> None:
        cells = comm.world * row.width
        # All ranks wait for it, whatever the table's size.
        super().__init__(regions, comm, device, cells, math.inf, mark)
        self._table = self.buffer[self.buffer.numel() - cells :].view(comm.world, -1)
        row.write(self._table, comm.rank)

    def votes(self) -> Votes:
        """Wait for the ranks' rows. Raises `TransportError` when an all-reduce failed."""
        self.wait()
        return Votes.read(self._table)


class VoteApart(StatusVote):
    """A status vote whose table travels by itself over `control`, in a tensor on the CPU, beside the small
    gradients. It has a row for each of the ranks of `control`."""

    def __init__(
        self,
        regions: list[Tensor],
        row: RankReport,
        comm: MeteredComm,
        device: torch.device,
        mark: Tensor | None = None,
        *,
        control: MeteredComm,
    ) -> None:
        SmallReduce.__init__(self, regions, comm, device, mark=mark)
        self._control = control
        self._said: Pending = DONE
        self._table = torch.empty(control.world, row.width, dtype=torch.float32, device="cpu")
        row.write(self._table, control.rank)

    def send(self, ended: Callable[[], None] = lambda: None) -> None:
        """Issue the all-reduces, and call `ended` at their end. Raises `TransportError`."""
        way = shortest_sum(self._control.world)
        self._said = said = self._control.all_reduce(self._table.view(-1), way)
        if self.buffer.numel():
            super().send(lambda: said.then(ended))
        else:
            self._pending = DONE
            said.then(ended)

    def votes(self) -> Votes:
        self._said.wait()
        return super().votes()
