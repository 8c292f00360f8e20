"""Gathered 16-bit parameters that a module's ranks keep, so that a gather sends what has changed.

A rank codes its shard against what it last sent, by value, at the gather. So whatever moves parameters costs
bytes, and never truth: no flag can go stale. Each gather begins with a collective of fixed size, in which
ranks tell what they are about to send, and a number that stands for all that they hold. They act on this one
table: nobody sends, all send codes, or all send their numbers as they are.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codec.exact_steps import HEADER_BYTES, Layout, StepsKey, decode_steps, digest_of, encode_steps
from gradwire.comm import Pending
from gradwire.comm.base import DONE
from gradwire.sources.fsdp.routes import Route

_LOG = logging.getLogger("gradwire")

MOST_BITS = 12
"""Bits per parameter above which numbers are sent as they are: decoding would take longer than it saves."""
AS_IT_IS = -1
"""In the place of a length: the numbers themselves will come."""
HEAD_BYTES = 24


class Sending(NamedTuple):
    """One gather under way: how it travels, its bytes, rows (targets, bytes), and the lengths of codes."""

    kind: str
    pending: Pending
    rows: Tensor
    lengths: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes that a rank sends to each other one, the head among them."""
        return HEAD_BYTES + self.rows.shape[1]


@dataclass
class Held:
    """Parameters of a module as last gathered: `values` (targets, elements of a shard).

    `number` is that of the module among all. `label` names it in messages. After `guard_every` gathers with
    changes, the next gather compares all values over ranks, once; 0 means never.
    """

    values: Tensor
    number: int
    label: str
    where: torch.device
    guard_every: int = 0
    state: int = 0
    """Stands for the values, and is equal on all ranks that hold the same; 0 if they may not be used."""
    changes: int = 0
    """Gathers with changes since values were compared or sent as they are.."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.values.nbytes

    def fits(self, shard: Tensor) -> bool:
        """True if `shard` may be one of the rows of `values`."""
        return shard.dtype == self.values.dtype and shard.numel() == self.values.shape[1]

    def send(self, shard: Tensor, route: Route) -> Sending:
        """Tell the other targets of `route` what this rank sends, and send it. Two collectives, or one if
        nothing has changed on any rank.

        `shard` (elements,) are this rank's numbers now. Until `take` has ended, the values are of no use.
        """
        try:
            frame = self._frame(shard, self.values[route.place])
        except (MemoryError, RuntimeError) as error:  # torch's and CUDA's lack of memory are RuntimeErrors
            # Others wait for this rank's head, so it does not raise. Numbers as they are need no coding.
            frame = None
            _LOG.warning(
                "module %r: what has changed could not be coded, so all parameters are sent as they are: "
                "%s: %s", self.label, type(error).__name__, error,
            )  # fmt: skip
        state, self.state = self.state, 0
        is_turn = bool(state) and 0 < self.guard_every <= self.changes
        if is_turn:
            self.changes = 0
        length = AS_IT_IS if frame is None else frame.numel()
        digest = _signed(digest_of(self.values)) if is_turn else 0
        head = torch.tensor([length, _signed(state), digest], device="cpu")
        heads = torch.empty(len(route.targets), 3, dtype=torch.int64, device=self.where)
        route.exchange(heads, head.to(self.where)).wait()
        lengths, states, digests = heads.T.tolist()
        if len(set(states)) == 1 and len(set(digests)) > 1:
            usual = Counter(digests).most_common(1)[0][0]
            wrong = [rank for rank, each in zip(route.targets, digests, strict=True) if each != usual]
            _LOG.warning(
                "module %r: what ranks %s keep of gathered parameters differs from what others keep, so all "
                "parameters are sent as they are", self.label, wrong,
            )  # fmt: skip
        if AS_IT_IS in lengths or len({*states}) > 1 or len({*digests}) > 1:
            row = shard.view(torch.uint8)
            rows = torch.empty(len(lengths), row.numel(), dtype=torch.uint8, device=self.where)
            return Sending("as they are", route.exchange(rows, row), rows, ())
        longest = max(lengths)
        rows = torch.zeros(len(lengths), longest, dtype=torch.uint8, device=self.where)
        self.state = state
        if not longest:
            return Sending("unchanged", DONE, rows, tuple(lengths))
        assert frame is not None, "or the numbers go as they are"
        row = torch.nn.functional.pad(frame, (0, longest - frame.numel()))
        return Sending("changes", route.exchange(rows, row), rows, tuple(lengths))

    def take(self, sent: Sending) -> None:
        """Take what `sent` has brought over into `values`. Raises `WireError` if bytes were damaged: the next
        gather then sends numbers as they are.
        """
        state, self.state = self.state, 0
        if sent.kind == "as they are":
            self.values.copy_(sent.rows.view(self.values.dtype))
            state, self.changes = digest_of(self.values) | 1, 0
        for row, length, values in zip(sent.rows, sent.lengths, self.values, strict=False):
            if length:
                here = values.to(self.where)
                decode_steps(row[:length], here, StepsKey(self.number, len(self.values), state))
                values.copy_(here)
        if any(sent.lengths):
            state, self.changes = digest_of(sent.rows) | 1, self.changes + 1
        self.state = state

    def _frame(self, shard: Tensor, last: Tensor) -> Tensor | None:
        """The code of what has changed, empty if nothing has; `None` if numbers should go as they are."""
        if not self.state:
            return None
        old = last.to(self.where)
        if torch.equal(shard.view(torch.int16), old.view(torch.int16)):
            return shard.new_empty(0, dtype=torch.uint8)
        layout: Layout = "runs" if shard.is_cpu else "widths"
        frame = encode_steps(shard, old, StepsKey(self.number, len(self.values), self.state), layout)
        return frame if 8 * (frame.numel() - HEADER_BYTES) <= MOST_BITS * shard.numel() + 1024 else None


def _signed(number: int) -> int:
    """Read 64 bits as an integer with a sign."""
    return number - (number >> 63 << 64)
