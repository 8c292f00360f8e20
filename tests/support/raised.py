"""What a call raises, as scenes return it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Raised:
    """An error, and when it came; without a type where there was none."""

    kind: str = ""
    text: str = ""
    after_s: float = 0.0
    notes: tuple[str, ...] = ()
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.kind else ""


def raised(call: Callable[[], object]) -> Raised:
    """By this call."""
    start_s = time.monotonic()
    try:
        call()
    except (Exception, SystemExit) as error:  # not Ctrl-C
        after_s, notes = time.monotonic() - start_s, tuple(getattr(error, "__notes__", ()))
        return Raised(type(error).__name__, str(error), after_s, notes, type(error.__cause__).__name__)
    return Raised(after_s=time.monotonic() - start_s)
