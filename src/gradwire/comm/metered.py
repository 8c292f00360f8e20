"""Counting what passes: bytes and rounds of one unit, and the zeros that a failed rank still owes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from gradwire.comm.base import Algorithm, Broadcasting, Comm, Pending, Round
from gradwire.errors import TransportError


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
    Blocks until the zeros have been sent. Raises `TransportError` where a length is owed that nobody but the
    exchange that failed has been told.
    """
    told: deque[int] = deque()
    for round_ in agreed[len(comm.rounds) :]:
        if round_.verb == "shift":
            told.extend(_shift(comm, round_, told, device))
        elif not round_.at_most:
            _send(comm, round_, torch.zeros(round_.numel, dtype=round_.dtype, device=device)).wait()


def _shift(comm: Metered, round_: Round, told: deque[int], device: torch.device) -> list[int]:
    """Shift zeros, as few as possible, and return what the other side tells of later shifts."""
    sent = heard = round_.numel
    if round_.at_most:
        if not told:
            raise TransportError("this rank failed between messages whose lengths only what failed has known")
        sent, heard = round_.least, round_.least + told.popleft()
    if not sent <= heard <= round_.numel:
        raise TransportError(f"a peer announces {heard} elements, where there are {round_.numel} at most")
    out = torch.empty(heard, dtype=round_.dtype, device=device)
    comm.shift(out, torch.zeros(sent, dtype=round_.dtype, device=device), round_.by).wait()
    tail = out.view(torch.uint8)[out.nbytes - 8 * round_.tells :].clone()
    words: list[int] = tail.view(torch.int64).tolist()
    return words


def _send(comm: Metered, round_: Round, payload: Tensor) -> Pending:
    match round_.verb:
        case "all_gather":
            return comm.all_gather(payload.new_empty(comm.world, round_.numel), payload)
        case "all_to_all":
            rows = payload.view(comm.world, -1)
            return comm.all_to_all(torch.empty_like(rows), rows)
        case "broadcast":
            return comm.broadcast(payload, round_.src, cast(Broadcasting, round_.algorithm))
        case _:
            return comm.all_reduce(payload, cast(Algorithm, round_.algorithm))
