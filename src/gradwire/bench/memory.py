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
    """Watches memory while `settings` settings are set up, one after the other."""

    def __init__(self, settings: int, available: Callable[[], int | None] = available_bytes) -> None:
        self._available, self._settings, self._done = available, settings, 0
        self._first = available()

    def after_one(self) -> None:
        """One more is set up. `TooLarge` if those that are left will not fit."""
        self._done += 1
        now, left = self._available(), self._settings - self._done
        if now is None or self._first is None:
            return
        each = (self._first - now) / self._done
        if each * left > now - MARGIN * self._first:
            raise TooLarge(
                f"all ranks of a setting take about {each / 1e9:.1f} GB, and {now / 1e9:.1f} GB are left for "
                f"{left} more settings: compare fewer recipes and peers at a time, or take fewer workers"
            )
