"""What the ranks tell each other at the end of a step, before anything is committed.

It rides on the step's last all-reduce as a table with one row per rank: everybody contributes its own
row and zeros elsewhere, so that the sum is the table itself, exactly.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import Tensor

from gradwire.errors import GradwireError, PeerFailed, RanksDisagree

HEADER = 4


def plan_number(*parts: object) -> int:
    """24 bits over everything that must be equal on all ranks: exact in a float32."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=3).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Row:
    """One rank's word on its step."""

    finite: bool
    failed: bool
    plan: int
    facts: tuple[float, ...] = ()
    stale: bool = False
    """What it sent of the model's buffers is not what they hold now."""

    @property
    def width(self) -> int:
        """Numbers in the row."""
        return HEADER + len(self.facts)

    def write(self, table: Tensor, rank: int) -> None:
        """Put this row into `table` (world, HEADER + facts), float32, zero elsewhere."""
        values = [
            float(not self.finite),
            float(self.failed),
            float(self.plan),
            float(self.stale),
            *self.facts,
        ]
        table.zero_()
        table[rank] = table.new_tensor(values)


@dataclass(frozen=True)
class Verdict:
    """All rows."""

    rows: tuple[Row, ...]

    @classmethod
    def read(cls, table: Tensor) -> Verdict:
        """Take a summed table apart."""
        rows = table.tolist()
        return cls(
            tuple(
                Row(row[0] == 0, row[1] != 0, int(row[2]), tuple(row[HEADER:]), stale=row[3] != 0)
                for row in rows
            )
        )

    @property
    def finite(self) -> bool:
        """Whether every rank's gradients and memories are finite."""
        return all(row.finite for row in self.rows)

    @property
    def stale(self) -> bool:
        """Whether the buffers that were sent are out of date."""
        return any(row.stale for row in self.rows)

    def error(self) -> GradwireError | None:
        """Why no rank may go on, or `None`."""
        plans = [row.plan for row in self.rows]
        if len(set(plans)) > 1:
            return RanksDisagree(
                f"plan or step differ between ranks (fingerprints by rank: {plans}). Was a state loaded on "
                "some ranks only, or from different steps?"
            )
        failed = [rank for rank, row in enumerate(self.rows) if row.failed]
        if failed:
            ranks = ", ".join(map(str, failed))
            return PeerFailed(
                f"rank {ranks} failed to encode or decode in this step; nothing was committed on any rank. "
                f"The traceback is on rank {ranks}."
            )
        return None
