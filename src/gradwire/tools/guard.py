"""Guard that compares the parameters of all ranks every few steps, by a number in the row of the status
vote."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gradwire.agreement.agree import checksum, require_agreement
from gradwire.comm import Comm, gathered
from gradwire.errors import RanksDisagree
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.step import Step

_BITS = 24
"""Bits of a checksum: as many as float32, the type of the vote's table, holds exactly."""
_NAMED = 3
_NOT_DUE = -1.0


def check_guard(every: int, *, is_replicated: bool) -> None:
    """Raise `ValueError` if `every` is not a number of steps, or if ranks hold shards, not replicas."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ValueError(f"guard_every={every!r} is not a number of steps; 0 means never")
    if every and not is_replicated:
        raise ValueError("guard_every compares replicas, and these ranks hold shards of the parameters")


class Guard:
    """Checksums of the parameters with which gradients are computed, in one step out of `every`.

    CRC-32 of their bytes: one pass over all parameters on the worker's thread, early in the backward pass.
    All checksums together make one number in the status vote. Only if that differs do ranks compare
    parameters one by one.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, Tensor]],
        every: int,
        uneven: Callable[[], bool] = lambda: False,
        read: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """Compare `parameters` in steps whose number is a multiple of `every`.

        Args:
            parameters: returns the parameters by name, in the same order on all ranks.
            every: steps from one check to the next; at least 1.
            uneven: returns True while replicas differ on purpose; nothing is compared then.
            read: returns a tensor on the host with the values of its argument.
        """
        self._parameters, self._every, self._uneven, self._read = parameters, every, uneven, read
        self._sums: dict[str, int] = {}

    def before(self, step: Step, env: ReducerEnvironment) -> None:
        """Tell 24 bits of a checksum if the check is due, of the parameters as they were in the forward pass.

        A guard sends its number in every row, so that ranks at different steps can find that out.
        """
        told = _NOT_DUE
        if step.number % self._every == 0 and not self._uneven():
            parameters = self._parameters()
            self._sums = {name: checksum(self._read(each.detach())) for name, each in parameters.items()}
            told = float(zlib.crc32(repr(list(self._sums.values())).encode()) % 2**_BITS)
        step.tell((told,), partial(self.error, step=step.number, control=env.control))

    def error(self, rows: Sequence[tuple[float, ...]], step: int, control: Comm) -> RanksDisagree | None:
        """Compare the replicas before `step`. Returns the error, the same on all ranks, if they differ; else
        `None`.

        `rows` has the numbers of every rank. If they differ, a collective over `control`: one all-gather of
        128 bytes, and one of eight bytes per parameter.
        """
        if len(set(rows)) == 1 or (_NOT_DUE,) in rows:
            return None
        names = f"{len(self._sums)}: {', '.join(self._sums)}"
        try:
            require_agreement({"the parameters that guard_every compares": names}, control)
        except RanksDisagree as error:
            return error
        mine = torch.tensor(list(self._sums.values()), dtype=torch.int64, device="cpu")
        sums = gathered(control, mine)
        named = []
        for name, column in zip(self._sums, sums.unbind(1), strict=True):
            ranks = [rank for rank, differs in enumerate((column != _most(column)).tolist()) if differs]
            if ranks:
                named.append(f"{name!r} on rank {', '.join(map(str, ranks))}")
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        return RanksDisagree(
            f"parameters differ between ranks before step {step}: {', '.join(named[:_NAMED])}{more} (from "
            "what most ranks hold, or else the first). Go on from an earlier save"
        )


def _most(column: Tensor) -> Tensor:
    """The checksum of most ranks; among equally frequent ones the first rank's."""
    votes = (column.view(-1, 1) == column.view(1, -1)).sum(1)
    return column[votes.argmax()]
