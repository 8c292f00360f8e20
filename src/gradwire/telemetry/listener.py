"""Hands metrics to a target at the end of every n-th backward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gradwire.telemetry.targets import Metrics, Write

_LOG = logging.getLogger("gradwire")


class Listener:
    """Called at the end of each backward pass; writes in every n-th.

    It never raises: this rank would stop, and its peers would wait. A target that fails is left alone from
    then on, which is logged.
    """

    def __init__(self, metrics: Callable[[], Metrics], write: Write, every: int) -> None:
        """Raises `ValueError` unless `every` is a whole number from 1 on."""
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: expected a number of backward passes, at least 1")
        self._metrics, self._every, self._passes = metrics, every, 0
        self._write: Write | None = write

    def __call__(self) -> None:
        """A backward pass has ended."""
        self._passes += 1
        if self._write is None or self._passes % self._every:
            return
        try:
            metrics = self._metrics()
            self._write(metrics, int(metrics["gradwire/step"]))
        except Exception as error:
            self._write = None
            _LOG.warning("metrics are logged no longer, training goes on: %r", error)
