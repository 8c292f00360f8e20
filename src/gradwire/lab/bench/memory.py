"""Whether all settings fit into memory: one that is swapped out or killed measures nothing."""

from collections.abc import Callable
from pathlib import Path

MARGIN = 0.1
"""Share of what was free that stays free, for what training takes beyond set-up."""


def available_bytes() -> int | None:
    """What could be taken without swapping, where the system says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


class TooLarge(ValueError):
    """What is asked for does not fit into this machine."""


class Room:
    """Watches memory while `settings` settings, whose workers have all started, are set up one by one."""

    def __init__(self, settings: int, available: Callable[[], int | None] = available_bytes) -> None:
        self._available, self._left = available, settings
        self._first = self._before = available()
        self._most = 0

    def after_one(self) -> None:
        """One more is set up. `TooLarge` if those left will not fit, each as large as the largest so far."""
        now, self._left = self._available(), self._left - 1
        if now is None or self._first is None or self._before is None:
            return
        self._most, self._before = max(self._most, self._before - now), now
        left = self._left
        if left and self._most * left > now - MARGIN * self._first:
            raise TooLarge(
                f"all ranks of a setting take about {self._most / 1e9:.1f} GB, and {now / 1e9:.1f} GB are "
                f"left for {left} more settings: take fewer of them, or fewer workers"
            )
