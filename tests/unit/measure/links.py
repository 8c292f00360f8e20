"""Ranks as threads on a link of known latency and bandwidth, in a time of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.comm import Comm, Pending, Round, ThreadComm
from gradwire.comm.base import DONE
from gradwire.planning.collectives import hops, serial_bytes


class SlowComm(Comm):
    """A `Comm` whose collectives begin when the last rank is there and take hops · α + bytes · β.

    `clock` is this rank's own, read before and after every collective; `late_s` passes before the former.
    `noise` multiplies a duration and is asked in the same order on all ranks.
    """

    def __init__(
        self,
        inner: ThreadComm,
        alpha_s: float,
        beta_s: float,
        *,
        late_s: float = 0.0,
        started_s: float = 0.0,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.rank, self.world = inner.rank, inner.world
        self._inner, self._alpha_s, self._beta_s = inner, alpha_s, beta_s
        self._late_s, self._noise = late_s, noise
        # Clocks of different ranks need not agree; what they share is how fast they run.
        self._offset_s, self._now_s = started_s, 0.0
        self._is_inside = False

    def clock(self) -> float:
        """Seconds on this rank's clock."""
        if not self._is_inside:
            self._now_s += self._late_s
        self._is_inside = not self._is_inside
        return self._now_s + self._offset_s

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        verb = round_.name
        times = torch.empty(self.world, 1, dtype=torch.float64)
        self._inner.all_gather(times, torch.tensor([self._now_s], dtype=torch.float64)).wait()
        self._inner.issue(round_, tensor, out).wait()
        taken_s = hops(verb, self.world) * self._alpha_s
        taken_s += serial_bytes(verb, round_.payload_bytes, self.world) * self._beta_s
        self._now_s = float(times.max()) + taken_s * self._noise()
        return DONE
