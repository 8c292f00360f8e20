"""Ranks that compute longer in some steps: a step waits for the slowest."""

from __future__ import annotations

import numpy as np


def slowest(spread: float, workers: int, steps: int, seed: int = 0) -> tuple[float, ...]:
    """How many times the mean rank's time the slowest of `workers` takes to compute, in each of `steps`.

    Each rank's time in each step is drawn by itself, log-normally with mean 1 and `spread` as the standard
    deviation of its logarithm. Ranks keep their draws when others are added, so more workers are never
    faster. Raises `ValueError` for a spread below 0, and where there is nothing to draw.

    >>> slowest(0.0, 4096, 2)
    (1.0, 1.0)
    >>> few, many = (slowest(0.1, workers, 100) for workers in (8, 512))
    >>> round(sum(few) / 100, 2), round(sum(many) / 100, 2)
    (1.15, 1.35)
    """
    if not 0.0 <= spread < float("inf"):
        raise ValueError(f"spread={spread} must be at least 0")
    if workers < 1 or steps < 1:
        raise ValueError(f"workers={workers}, steps={steps}: there must be at least one")
    drawn = np.random.default_rng(seed).standard_normal((workers, steps))
    return tuple(np.exp(spread * drawn.max(axis=0) - spread**2 / 2).tolist())
