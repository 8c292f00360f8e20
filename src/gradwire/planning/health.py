"""Signs that training suffers from unsent gradient, from a few numbers of all ranks.

Unsent gradient should reach a plateau. If it grows in proportion to the gradients of a step, gradients shrink
faster than they are sent, or errors feed on themselves. Losses, if the user notes them, should not rise by
more than single steps vary, and than means vary from look to look. Each sign must show twice in a row; every
rank sees the same numbers. A checkpoint has them, so that a resumed run judges as one that never stopped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, pvariance
from typing import Any, NamedTuple

from gradwire.planning.change_detection import deviation
from gradwire.planning.lateness import Lateness, Weighed

EVERY = 32
"""Steps from one look to the next: a look takes two passes over the memory."""
GROWN = 8.0
"""Factor by which unsent gradient must grow to count as a sign. Over n steps, noise adds up to √n times
itself, so a memory that fills slowly reaches three times its size in the first measurements."""
IN_A_ROW = 2
_FIRST = 3
"""Looks from which the usual amount is told."""
_LEAST = 0.01
"""The share by which a loss must rise at least."""
_NEIGHBOURS = 8
"""Number of differences between neighbouring measurements from which their spread is estimated."""
_APART = 7.0
"""Standard deviations of these differences by which a loss must rise. Among thousands of means that only
vary, lowest and highest are 7 standard deviations apart. Neighbours differ by one or more, unless more
than half of the variation persists from one measurement to the next."""

_MOST_NOTED = 4096
"""Number of losses kept between measurements, the last ones. Without a memory, no measurement takes them."""
_KEPT = 64
"""Differences of neighbouring looks that are kept, the last ones."""
_LARGEST = 1e18
"""Losses stay below this, whose square a status vote's float32 can still hold."""


class Losses(NamedTuple):
    """Number, mean and variance of some losses."""

    number: float
    mean: float
    variance: float


NO_LOSSES = Losses(0, 0.0, 0.0)


def pooled(parts: Sequence[Losses]) -> Losses:
    """Number, mean and variance of several groups of losses together.

    >>> pooled([Losses(2, 1.0, 0.0), Losses(2, 3.0, 0.0), Losses(0, 0.0, 0.0)])
    Losses(number=4, mean=2.0, variance=1.0)
    """
    number = sum(each.number for each in parts)
    if number == 0:
        return NO_LOSSES
    mean = sum(each.number * each.mean for each in parts) / number
    squares = sum(each.number * (each.variance + (each.mean - mean) ** 2) for each in parts)
    return Losses(number, mean, squares / number)


def _with_earlier(earlier: Losses, values: Sequence[float]) -> Losses:
    now = Losses(len(values), fmean(values), pvariance(values)) if values else NO_LOSSES
    return pooled([earlier, now]) if earlier.number else now


class Lag:
    """Norm of the unsent gradient under one recipe, in multiples of the norm of a step's gradients.

    The median of the first three measurements is the usual amount. `add` reports growth when two measurements
    in a row are above 8 times that, and above 1.

    >>> lag = Lag()
    >>> [lag.add(fresh=1.0, unsent=unsent) for unsent in (2.0, 3.0, 3.0, 30.0)]
    ['', '', '', '']
    >>> lag.add(fresh=1.0, unsent=31.0)
    "what is unsent has grown from 3.0 to 31.0 times a step's gradient"
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._above = 0

    def add(self, fresh: float, unsent: float) -> str:
        """Add the norms of a step's gradients and of the unsent gradient. Returns a sentence if the latter
        has grown, else "". Norms that are not finite are ignored, and so is a step without gradients.
        """
        if not 0.0 < fresh < math.inf or not unsent < math.inf:
            return ""
        lag = unsent / fresh
        if len(self._first) < _FIRST:
            self._first.append(lag)
            return ""
        usual = median(self._first)
        # Below the gradients of one step it is too little to do harm.
        self._above = self._above + 1 if lag > max(GROWN * usual, 1.0) else 0
        if self._above < IN_A_ROW:
            return ""
        return f"what is unsent has grown from {usual:.1f} to {lag:.1f} times a step's gradient"

    def save(self) -> dict[str, Any]:
        """The first measurements, and the number of those in a row that have grown."""
        return {"first": list(self._first), "above": self._above}

    def take_up(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `save` returned."""
        self._first, self._above = list(saved["first"]), saved["above"]


class LossTrend:
    """Losses of some steps after those of others.

    >>> trend = LossTrend()
    >>> falling = [trend.add(Losses(32, 2.0 + 0.5**number, 0.04)) for number in range(16)]
    >>> [trend.add(Losses(32, mean, 0.04)) for mean in (2.1, 2.5, 2.6)]
    ['', '', 'the loss has risen from 2 to 2.6']
    """

    def __init__(self) -> None:
        self._lowest: Losses | None = None
        self._last: float | None = None
        self._differences: deque[float] = deque(maxlen=_KEPT)
        self._above = 0

    def add(self, some: Losses) -> str:
        """Add the next losses. Returns a sentence if they have risen, else an empty one."""
        if some.number < 2:
            return ""
        if self._last is not None:
            self._differences.append(some.mean - self._last)
        self._last, lowest = some.mean, self._lowest
        if lowest is None or some.mean <= lowest.mean:
            self._lowest, self._above = some, 0
            return ""
        if len(self._differences) < _NEIGHBOURS:
            return ""
        spread = math.sqrt((some.variance + lowest.variance) / 2)
        varies = _APART * deviation(self._differences)
        rise = some.mean - lowest.mean
        self._above = self._above + 1 if rise > max(spread, varies, _LEAST * abs(lowest.mean)) else 0
        if self._above < IN_A_ROW:
            return ""
        self._lowest, self._above = some, 0
        return f"the loss has risen from {lowest.mean:.4g} to {some.mean:.4g}"

    def save(self) -> dict[str, Any]:
        """The lowest and the last losses, and how means differ, in plain values."""
        return {
            "lowest": None if self._lowest is None else list(self._lowest),
            "last": self._last,
            "differences": list(self._differences),
            "above": self._above,
        }

    def take_up(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `save` returned."""
        self._lowest = None if saved["lowest"] is None else Losses(*saved["lowest"])
        self._last, self._above = saved["last"], saved["above"]
        self._differences = deque(saved["differences"], maxlen=_KEPT)


class Condition:
    """Signs and lateness of one composition, whose units take turns in a `cycle` of steps."""

    def __init__(self, cycle: int = 1) -> None:
        self.lag, self.lateness = Lag(), Lateness(cycle)
        self.has_complained = False
        """Whether a sign has been reported: each composition is reported once."""
        self.sign = ""
        """A sign that the judge has not been told yet."""
        self.waiting: tuple[int, Callable[[], Weighed]] | None = None
        """A step, and this rank's norms in it, which the next step tells the other ranks."""

    def save(self) -> dict[str, Any]:
        """Everything that is equal on all ranks, in plain values."""
        return {
            "lag": self.lag.save(),
            "lateness": self.lateness.save(),
            "complained": self.has_complained,
            "sign": self.sign,
        }

    def save_waiting(self) -> list[float] | None:
        """This rank's norms that wait to be told, after their step; `None` if there are none."""
        if self.waiting is None:
            return None
        step, weighed = self.waiting
        numbers = weighed()
        # No rank takes others.
        return [step, *numbers] if all(map(math.isfinite, numbers)) else None

    def take_up(self, saved: Mapping[str, Any], waiting: Sequence[float] | None) -> None:
        """Go on from what `save` and `save_waiting` returned."""
        self.lag.take_up(saved["lag"])
        self.lateness.take_up(saved["lateness"])
        self.has_complained, self.sign = saved["complained"], saved["sign"]
        if waiting is not None:
            # Older states also have the norm of discarded gradient, which decides nothing.
            step, fresh, unsent, *_discarded, latest, layer = waiting
            weighed = Weighed(fresh, unsent, latest, layer)
            self.waiting = int(step), lambda: weighed


class Health:
    """The losses that one rank has noted, the trend of all ranks' losses, and the signs found, by step."""

    def __init__(self) -> None:
        self.trend = LossTrend()
        self.complaints: list[tuple[int, str]] = []
        self.told = 0
        """The number of signs that are in the log."""
        self._earlier = NO_LOSSES
        """Losses noted before the run was resumed."""
        self._noted: deque[float] = deque(maxlen=_MOST_NOTED)

    def note(self, loss: float) -> None:
        """Add a loss; callable from any thread. Losses that are not finite, or far too large, are ignored."""
        if abs(loss) < _LARGEST:
            self._noted.append(loss)

    def drain(self) -> Losses:
        """The losses noted since the last call."""
        values = [self._noted.popleft() for _ in range(len(self._noted))]
        earlier, self._earlier = self._earlier, NO_LOSSES
        return _with_earlier(earlier, values)

    @property
    def noted(self) -> Losses:
        """The losses noted since the last `drain`, which stay."""
        return _with_earlier(self._earlier, list(self._noted))

    def save(self) -> dict[str, Any]:
        """Everything that is equal on all ranks, in plain values."""
        return {"losses": self.trend.save(), "complaints": [list(each) for each in self.complaints]}

    def take_up(self, saved: Mapping[str, Any], noted: Losses) -> None:
        """Go on from what `save` returned, and from the losses that this rank had `noted`."""
        self.trend.take_up(saved["losses"])
        self.complaints = [(step, sign) for step, sign in saved["complaints"]]
        self.told = len(self.complaints)
        self._noted.clear()
        self._earlier = noted._replace(number=min(noted.number, _MOST_NOTED))
