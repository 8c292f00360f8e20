"""Spans of time, as arrays (number, 2) of starts and ends in seconds, in the order of their starts."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

Spans = npt.NDArray[np.float64]


def ordered(flat: array[float]) -> Spans:
    """Spans from starts and ends that alternate in `flat`.

    >>> ordered(array("d", [3.0, 4.0, 1.0, 2.0])).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    found = np.array(flat, dtype=np.float64).reshape(-1, 2)
    return found[np.argsort(found[:, 0], kind="stable")]


def union(spans: Spans) -> Spans:
    """Merge spans that overlap or touch.

    >>> union(np.array([[0.0, 2.0], [1.0, 3.0], [5.0, 6.0]])).tolist()
    [[0.0, 3.0], [5.0, 6.0]]
    """
    if len(spans) == 0:
        return spans
    ends = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate(([True], spans[1:, 0] > ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((spans[first, 0], ends[last]), axis=1)


def within(spans: Spans, start_s: float, stop_s: float) -> Spans:
    """The parts of disjoint spans (spans, 2), in seconds, that lie between `start_s` and `stop_s`.

    >>> within(np.array([[0.0, 2.0], [3.0, 5.0], [7.0, 8.0]]), 1.0, 4.0).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    cut = spans.clip(start_s, max(start_s, stop_s))
    return cut[cut[:, 1] > cut[:, 0]]


def seconds(spans: Spans) -> float:
    """The time that disjoint spans take together.

    >>> seconds(np.array([[0.0, 2.0], [3.0, 5.0]]))
    4.0
    """
    return float((spans[:, 1] - spans[:, 0]).sum())


def outside(spans: Spans, others: Spans) -> float:
    """The time of disjoint spans in which none of `others`, disjoint too, is under way.

    >>> outside(np.array([[0.0, 4.0]]), np.array([[1.0, 2.0], [3.0, 9.0]]))
    2.0
    """
    both = np.concatenate((spans, others))
    together = union(both[np.argsort(both[:, 0], kind="stable")])
    return seconds(together) - seconds(others)
