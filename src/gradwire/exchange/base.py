"""The one type that everything between a gradient and its mean has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.memory import Memory
from gradwire.moment import Moment

WHOLE = 0
"""The grain of an exchange whose units must hold whole parameters."""

Finish = Callable[[], None]
"""Waits for the last round and decodes it. Local: it must not issue a collective."""


class Exchange(Protocol):
    """How the ranks agree on the mean of one unit.

    Attributes, each with a law in `tests/laws`:

    - `grain`: cuts fall on multiples of so many elements, or, if it is `WHOLE`, between parameters.
    - `conserves`: the mean of what came is the mean that is returned and the mean of what is left.
    - `contractive`: what is left is not larger than what came. By how much it is smaller, and what of it
      stays while ranks disagree, `docs/laws.md` says exchange by exchange.
    - `in_place`: `mean` may be `x` itself, and nothing is left to remember.
    - `may_overflow`: finite inputs can give a non-finite mean (a narrow payload type, sums over a matrix).
    - `memory`: what becomes of the unsent part; `None` when nobody remembers it.
    """

    @property
    def grain(self) -> int: ...
    @property
    def conserves(self) -> bool: ...
    @property
    def contractive(self) -> bool: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def may_overflow(self) -> bool: ...
    @property
    def memory(self) -> Memory | None: ...

    def start(self, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> Finish:
        """Encode and issue all rounds of one unit, waiting for all of them but the last.

        `x` (numel,) arrives as the error-fed gradient. When the returned function has been called, `x`
        is what was left unsent and `mean` (numel,) is what every rank applies, bit-identical on all.
        """
        ...

    def rounds(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[Round, ...]:
        """The collectives that `start` will issue, in order; a function of its arguments alone.

        Those marked `at_most` may come out shorter, as ranks agree on the way. Once a rank has issued what
        they are agreed by, it issues them even if its own encode fails: nobody else knows their sizes.

        None at all means that nothing travels: the mean is zero and `x` stays as it is, so whoever knows
        need not call `start`.
        """
        ...


def run(exchange: Exchange, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> None:
    """Start and finish in one go, for tests and for whoever has nothing to overlap."""
    exchange.start(x, mean, comm, at)()
