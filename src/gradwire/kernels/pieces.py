"""Stretches of a bucket and their places in a plane, for many parameters in one call of `compensate`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray


class Pieces:
    """Table of pieces: rows (start in the plane, start in the bucket, elements). `compensate` reports by
    number of row.

    >>> pieces = Pieces([(0, 10, 4), (4, 20, 2)])
    >>> len(pieces), pieces.numel, pieces.ends
    (2, 6, (6, 22))
    """

    def __init__(self, rows: Iterable[tuple[int, int, int]]) -> None:
        self.table: NDArray[np.int64] = np.array([*rows], np.int64).reshape(-1, 3)
        if (self.table < 0).any():
            raise ValueError(f"pieces begin at 0 or later and have 0 or more elements: {self.table.tolist()}")

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def numel(self) -> int:
        """Elements of all rows."""
        return int(self.table[:, 2].sum())

    @cached_property
    def ends(self) -> tuple[int, int]:
        """Fewest elements that plane and bucket must have."""
        ends = self.table[:, :2] + self.table[:, 2:]
        return (int(ends[:, 0].max()), int(ends[:, 1].max())) if len(self) else (0, 0)

    def slices(self) -> Iterable[tuple[slice, slice]]:
        """Slices of each piece in the plane and in the bucket."""
        for plane, bucket, numel in self.table.tolist():
            yield slice(plane, plane + numel), slice(bucket, bucket + numel)

    def within(self, here: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Cut the table to a stretch of elements, for one of several threads.

        `here` counts the elements of all pieces, one piece after the other. A piece that lies partly in it
        gets a shorter row.

        Returns (rows, numbers of their pieces).
        """
        stops = np.cumsum(self.table[:, 2])
        starts = stops - self.table[:, 2]
        first, last = np.maximum(starts, here.start), np.minimum(stops, here.stop)
        numbers = np.flatnonzero(first < last)
        rows = self.table[numbers]
        rows[:, :2] += (first - starts)[numbers, None]
        rows[:, 2] = (last - first)[numbers]
        return rows, numbers


@lru_cache(maxsize=1024)
def whole(numel: int) -> Pieces:
    """A single piece that maps a bucket of `numel` elements to a plane of the same size."""
    return Pieces([(0, 0, numel)])
