"""Counting what passes: bytes and rounds of one unit, and the zeros that a failed rank still owes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from gradwire.comm.base import Algorithm, Broadcasting, Comm, Pending, Round


class Metered:
    """A `Comm` that remembers every round issued through it, and the last one still under way."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.world = comm.world
        self.rounds: list[Round] = []
        self.last: Pending | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes sent so far, in the sense of `Round.wire_bytes`."""
        return sum(issued.wire_bytes(self.world) for issued in self.rounds)

    def _note(self, round_: Round, issue: Callable[[], Pending]) -> Pending:
        # A round counts once it was issued: whoever fills up for a failed encode relies on it.
        self.last = issue()
        self.rounds.append(round_)
        return self.last

    def all_reduce(self, tensor: Tensor, algorithm: Algorithm = "library") -> Pending:
        """See `Comm.all_reduce`."""
        round_ = Round("all_reduce", tensor.numel(), tensor.dtype, algorithm=algorithm)
        return self._note(round_, lambda: self._comm.all_reduce(tensor, algorithm))

    def all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_gather`."""
        round_ = Round("all_gather", tensor.numel(), tensor.dtype)
        return self._note(round_, lambda: self._comm.all_gather(out, tensor))

    def broadcast(self, tensor: Tensor, src: int, algorithm: Broadcasting = "library") -> Pending:
        """See `Comm.broadcast`."""
        round_ = Round("broadcast", tensor.numel(), tensor.dtype, src=src, algorithm=algorithm)
        return self._note(round_, lambda: self._comm.broadcast(tensor, src, algorithm))

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_to_all`."""
        round_ = Round("all_to_all", tensor.numel(), tensor.dtype)
        return self._note(round_, lambda: self._comm.all_to_all(out, tensor))

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Pending:
        """See `Comm.shift`."""
        round_ = Round("shift", tensor.numel(), tensor.dtype, by)
        return self._note(round_, lambda: self._comm.shift(out, tensor, by))


def owe_zeros(comm: Metered, agreed: Sequence[Round], device: torch.device) -> None:
    """Issue the rest of the `agreed` rounds with zeros, so that peers find the order they expect.

    Called on a rank whose encode failed; the step is not committed anywhere, so values do not matter.
    Blocks until the zeros have been sent.
    """
    for round_ in agreed[len(comm.rounds) :]:
        payload = torch.zeros(round_.numel, dtype=round_.dtype, device=device)
        _send(comm, round_, payload).wait()


def _send(comm: Metered, round_: Round, payload: Tensor) -> Pending:
    match round_.verb:
        case "all_reduce":
            return comm.all_reduce(payload, cast(Algorithm, round_.algorithm))
        case "all_gather":
            return comm.all_gather(payload.new_empty(comm.world, round_.numel), payload)
        case "all_to_all":
            rows = payload.view(comm.world, -1)
            return comm.all_to_all(torch.empty_like(rows), rows)
        case "shift":
            return comm.shift(torch.empty_like(payload), payload, round_.by)
        case "broadcast":
            return comm.broadcast(payload, round_.src, cast(Broadcasting, round_.algorithm))
