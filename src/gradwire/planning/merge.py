"""Optimal groups of tensors for a codec with a cost per call (MergeComp, Wang et al. 2021, section 4.3).

Groups of tensors in ready order are compressed in h(x) = B_h + γ_h·x and sent in g(x) = B_g + γ_g·x.
Compression is encoding and decoding. It holds up the backward pass; communication overlaps with both.
`optimal_boundaries` finds the best boundaries from these costs. `search_boundaries` is the paper's own
search, Algorithm 2 (section 4.3; proofs in 9.3). It needs only the seconds of a grouping, from a cost model
or from timed iterations. It tries fewer than 50 groupings for two groups.

Differences from the paper: for costs of any form, the paper states that the problem cannot be solved in
polynomial time (lemma 1), and then assumes linear costs (assumption 5). With linear costs, dynamic
programming solves it. When group y ends with tensor i, everything before has been computed and y groups of
S(i) elements have been compressed, wherever the boundaries lie. So the wire is free again at C_y(i) = min
over j < i of max(C_{y−1}(j), B(i) + y·B_h + γ_h·S(i)) + g(S(i) − S(j)). The optimum is min over y of C_y(N),
after O(N²) steps per y. Communication also overlaps with the compression of later groups; the paper's
equation 7 mentions computation only. The forward pass does not depend on the boundaries and is left out.

The search bisects two groups by the sign of F(k+d) − F(k). With d = 1 this is exact on the model, because F
is the larger of a rising and a falling function of k. For timed iterations, neighbouring boundaries differ by
less than the noise of a step; there d is an eighth of the bracket. The paper publishes no value of α.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire.planning.boundaries import Boundaries, even_groups, layer_wise
from gradwire.planning.costs import NOTHING, BackwardTiming, CodecCost, Line
from gradwire.planning.step_time import Work, held_up, step_time

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GroupCost:
    """Seconds for a group of x elements: encoding, sending (g), and decoding.

    `decode` covers all payloads that a rank decodes: N times a codec's own line after an all-gather.
    """

    encode: Line
    communicate: Line
    decode: Line = NOTHING

    def __post_init__(self) -> None:
        lines = (self.encode, self.communicate, self.decode)
        if min(min(line.base_s, line.slope_s) for line in lines) < 0.0:
            raise ValueError(f"a cost in {self} falls with the size of a group; it must be 0 or rise")

    @property
    def compress(self) -> Line:
        """Encoding and decoding of a group, the paper's h."""
        return Line(self.encode.base_s + self.decode.base_s, self.encode.slope_s + self.decode.slope_s)


Seconds = Callable[[Boundaries], float]
"""A function from a grouping to the time of its step, from the beginning of the backward pass."""


def seconds_of(backward: BackwardTiming, cost: GroupCost, *, beside: bool = True) -> Seconds:
    """A function from a grouping to the time of a step (`step_time`), with one collective per unit.

    With `beside`, the codec runs on a worker of its own beside the backward pass. Otherwise it holds up the
    backward pass: MergeComp's F.

    >>> backward = BackwardTiming(0.0, (1.0, 2.0), (1, 1), 2.0)
    >>> cost = GroupCost(Line(0.5, 0.0), Line(1.0, 0.0), Line(0.25, 0.0))
    >>> seconds_of(backward, cost)((1,)), seconds_of(backward, cost, beside=False)((1,))
    (3.75, 4.5)
    """
    ends, tensors = list(accumulate(backward.numel, initial=0)), len(backward.numel)
    codec, startup_s, element_s = (
        CodecCost(cost.encode, cost.decode),
        cost.communicate.base_s,
        cost.communicate.slope_s,
    )

    def units(boundaries: Boundaries) -> Iterator[Work]:
        first = 0
        for stop in (*boundaries, tensors):
            numel = ends[stop] - ends[first]
            yield backward.ready_s[stop - 1], numel, ((element_s * numel, 0.0, startup_s),)
            first = stop

    if beside:
        return lambda boundaries: step_time(units(boundaries), backward.total_s, codec)
    return lambda boundaries: step_time(*held_up(units(boundaries), backward.total_s, cost.compress))


def optimal_boundaries(backward: BackwardTiming, cost: GroupCost, most: int | None = None) -> Boundaries:
    """The grouping of least time where the codec holds up the backward pass; no other one is better.

    It has at most `most` groups.

    Ready times must ascend. O(N²) per number of groups, and numbers that cannot win any more are not tried.

    Raises `ValueError` if ready times do not ascend.

    >>> backward = BackwardTiming(0.0, (1.0, 2.0, 3.0), (4, 4, 1), 3.0)
    >>> optimal_boundaries(backward, GroupCost(Line(0.0, 0.0), Line(0.1, 0.25)))
    (1, 2)
    """
    tensors = len(backward.numel)
    if tensors < 2:
        return ()
    _require_ascending(backward)
    table = _Table(backward, cost)
    most = tensors if most is None else max(1, min(most, tensors))
    best_s, best = _first_guess(backward, cost, most)
    for _ in range(most):
        if not table.is_open(best_s):
            break
        found_s = table.extend()
        if found_s < best_s:
            best_s, best = found_s, table.boundaries()
    return best


def _first_guess(backward: BackwardTiming, cost: GroupCost, most: int) -> tuple[float, Boundaries]:
    """The best of the simple groupings into at most `most` groups, with its seconds: a bound from the
    start.
    """
    tensors = len(backward.numel)
    guesses = [even_groups(tensors, parts) for parts in (1, 2, 4, 8) if parts <= most]
    if most == tensors:
        guesses.append(layer_wise(tensors))
    seconds = seconds_of(backward, cost, beside=False)
    return min((seconds(boundaries), boundaries) for boundaries in guesses)


def _require_ascending(backward: BackwardTiming) -> None:
    if np.any(np.diff(backward.ready_s) < 0.0):
        raise ValueError(
            "ready_s must ascend: groups are made of tensors in the order in which they are ready"
        )


class _Table:
    """Table of C_y for y = 1, 2, …, computed row by row. Entry i of a row stands for the first i tensors.

    Entries that cannot lead to the optimum are infinite. They are of two kinds: no continuation is short
    enough; or fewer groups reach the same tensor no later, and further groups could only add delay.
    """

    def __init__(self, backward: BackwardTiming, cost: GroupCost) -> None:
        self._cost, self._total_s = cost, backward.total_s
        self._sizes: Floats = np.cumsum(np.array((0, *backward.numel), np.float64))
        ready: Floats = np.array((0.0, *backward.ready_s))
        self._h = cost.compress
        self._compressed: Floats = ready + self._h.slope_s * self._sizes
        self._slope = cost.communicate.slope_s
        # The time that a boundary before tensor j saves the last group, as an addend; nothing can follow the
        # end.
        tensors = len(backward.numel)
        saved = np.broadcast_to(-self._slope * self._sizes[:-1], (tensors, tensors))
        self._saved: Floats = np.where(np.tri(tensors, dtype=bool), saved, np.inf)
        self._scratch: Floats = np.empty_like(self._saved)
        self._rows: list[Floats] = [np.where(np.arange(tensors + 1) == 0, 0.0, np.inf)]
        self._earliest = self._rows[0].copy()
        # Nothing from tensor i on can leave before i has been compressed.
        leaving = self._compressed[1:] + self._slope * (self._sizes[-1] - self._sizes[:-1])
        self._leaving: Floats = np.maximum.accumulate(leaving[::-1])[::-1]

    def is_open(self, best_s: float) -> bool:
        """Close groupings that cannot take less than `best_s`. True if some grouping is left to extend."""
        cost, row, groups = self._cost, self._rows[-1], len(self._rows)
        sent_s = row[:-1] + self._slope * (self._sizes[-1] - self._sizes[:-1])
        rest_s = np.maximum(sent_s, self._leaving + groups * self._h.base_s) + cost.communicate.base_s
        row[:-1][rest_s >= best_s] = np.inf
        return bool(np.isfinite(row[:-1]).any())

    def extend(self) -> float:
        """Add the row for one group more. Returns the seconds of a step with the best such grouping."""
        groups, row = len(self._rows), self._rows[-1]
        open_ = np.flatnonzero(np.isfinite(row[:-1]))
        here = slice(int(open_[0]), int(open_[-1]) + 1)
        ready = self._compressed[here.start + 1 :] + groups * self._h.base_s
        scratch = self._scratch[here.start :, here]
        np.maximum(row[here], ready[:, None], out=scratch)
        scratch += self._saved[here.start :, here]
        found = np.full_like(row, np.inf)
        found[here.start + 1 :] = scratch.min(axis=1)
        found += self._cost.communicate.base_s + self._slope * self._sizes
        found[found >= self._earliest] = np.inf
        np.minimum(self._earliest, found, out=self._earliest)
        self._rows.append(found)
        return float(self._last_group(groups).min())

    def _last_group(self, groups: int) -> Floats:
        """Seconds of a step whose last of `groups` groups begins after tensor j, for all j."""
        sizes = self._sizes[-1] - self._sizes[:-1]
        compressed = groups * self._h.base_s + self._h.slope_s * self._sizes[-1]
        ready = self._compressed[-1] + groups * self._h.base_s
        ended = np.maximum(self._rows[groups - 1][:-1], ready) + self._cost.communicate.base_s
        return _floats(np.maximum(ended + self._slope * sizes, self._total_s + compressed))

    def boundaries(self) -> Boundaries:
        """The best grouping into as many groups as there are rows."""
        groups = len(self._rows) - 1
        boundary = int(self._last_group(groups).argmin())
        found = []
        for before in range(groups - 1, 0, -1):
            found.append(boundary)
            ready = self._compressed[boundary] + before * self._h.base_s
            row = np.maximum(self._rows[before - 1][:boundary], ready) - self._slope * self._sizes[:boundary]
            boundary = int(row.argmin())
        return tuple(reversed(found))


def _floats(values: Any) -> Floats:
    return np.asarray(values, np.float64)


_LEVEL = 1 - 1e-12
"""Above rounding (1e-16), below what a single element among 10^9 changes."""


def search_boundaries(
    seconds: Seconds, tensors: int, most: int = 2, alpha: float = 0.0, apart: float = 0.0
) -> Boundaries:
    """Algorithm 2: the best grouping found into 1, 2, … `most` groups (Y in the paper).

    Args:
        seconds: time of a step with given boundaries; called once for each grouping.
        tensors: number of tensors.
        most: the most groups that are tried.
        alpha: the search ends when one more group gains less than this share, or makes the step slower.
        apart: see `bisected`.

    It makes O(N^(Y−2) log N) different calls of `seconds`. Raises `ValueError` for `most` below 1 or `alpha`
    below 0.

    >>> calls = []
    >>> search_boundaries(lambda tried: calls.append(tried) or abs(sum(tried) - 700), tensors=1000)
    (700,)
    >>> len(calls) < 50
    True
    """
    if most < 1 or alpha < 0.0:
        raise ValueError(f"most={most} must be at least 1, and alpha={alpha} at least 0")
    known = cache(seconds)
    best: Boundaries = ()
    for groups in range(2, min(most, tensors) + 1):
        found = _best_of(known, tensors, groups, apart)
        if known(found) > known(best):
            return best
        gain = known(best) - known(found)
        if gain < alpha * known(best):
            return found
        best = found
    return best


def _best_of(seconds: Seconds, tensors: int, groups: int, apart: float) -> Boundaries:
    """The best grouping into `groups` groups, by trying all choices of the first boundaries, each with a last
    boundary from `bisected`; `seconds`, `tensors` and `apart` are as there.
    """
    heads = combinations(range(1, tensors - 1), groups - 2)
    return min((bisected(seconds, tensors, head, apart) for head in heads), key=seconds)


def bisected(seconds: Seconds, tensors: int, head: Boundaries = (), apart: float = 0.0) -> Boundaries:
    """`head` and one more boundary after it, at the minimum of `seconds`; O(log N) calls.

    Compared boundaries lie the share `apart` of the bracket apart, at least one tensor.
    """
    low, high = (head[-1] if head else 0) + 1, tensors - 1
    while low < high:
        left, right = compared(high - low, apart)
        # Tensors that are ready together leave F level where it rises. Rounding must not send the search
        # right there.
        if seconds((*head, low + right)) < seconds((*head, low + left)) * _LEVEL:
            low += left + 1
        else:
            high = low + right - 1
    return (*head, low)


def compared(span: int, apart: float) -> tuple[int, int]:
    """Which two of the `span` + 1 boundaries of a bracket are compared: about its middle.

    >>> compared(1, 0.125), compared(10, 0.0), compared(40, 0.125)
    ((0, 1), (4, 5), (17, 22))
    """
    distance = max(1, int(span * apart))
    left = (span - distance) // 2
    return left, left + distance
