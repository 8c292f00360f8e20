"""Ranks as threads on a link of known latency and bandwidth, in a time of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.comm import Comm, Pending, ThreadComm
from gradwire.comm.base import DONE, Algorithm
from gradwire.measure.pattern import hops, serial_bytes


class SlowComm:
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

    def _pass(self, verb: str, tensor: Tensor, issue: Callable[[Comm], Pending]) -> Pending:
        times = torch.empty(self.world, 1, dtype=torch.float64)
        self._inner.all_gather(times, torch.tensor([self._now_s], dtype=torch.float64)).wait()
        issue(self._inner).wait()
        payload_bytes = tensor.numel() * tensor.element_size()
        taken_s = hops(verb, self.world) * self._alpha_s
        taken_s += serial_bytes(verb, payload_bytes, self.world) * self._beta_s
        self._now_s = float(times.max()) + taken_s * self._noise()
        return DONE

    def all_reduce(self, tensor: Tensor, algorithm: Algorithm = "library") -> Pending:
        name = "all_reduce" if algorithm == "library" else f"all_reduce/{algorithm}"
        return self._pass(name, tensor, lambda comm: comm.all_reduce(tensor, algorithm))

    def all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        return self._pass("all_gather", tensor, lambda comm: comm.all_gather(out, tensor))

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        return self._pass("broadcast", tensor, lambda comm: comm.broadcast(tensor, src))

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Pending:
        return self._pass("all_to_all", tensor, lambda comm: comm.all_to_all(out, tensor))

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Pending:
        return self._pass("shift", tensor, lambda comm: comm.shift(out, tensor, by))
