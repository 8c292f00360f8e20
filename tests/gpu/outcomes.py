"""What a part says of each of its checks, and how it gets that to the process that started it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["passed", "failed", "skipped"]
MARK = "GRADWIRE-CHECK "
"""Begins a line on which a part tells an outcome. All its other lines are a log."""


@dataclass(frozen=True)
class Outcome:
    """One check: its name, how it ended, and a reason or a figure."""

    name: str
    status: Status
    detail: str = ""

    def line(self) -> str:
        """For the other process."""
        return MARK + json.dumps(asdict(self))


Tell = Callable[[Outcome], None]


class Skip(Exception):
    """A check cannot run here; the text says why."""


def outcome_of(line: str) -> Outcome | None:
    """What `line` tells; `None` if it belongs to the log."""
    return Outcome(**json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None


def each(tell: Tell, checks: Mapping[str, Callable[[], str | None]]) -> None:
    """Run all of them, whatever comes of one; what they return is their figure."""
    for name, check in checks.items():
        try:
            tell(Outcome(name, "passed", check() or ""))
        except Skip as reason:
            tell(Outcome(name, "skipped", str(reason)))
        except Exception as error:
            traceback.print_exc()
            tell(Outcome(name, "failed", f"{type(error).__name__}: {error}"))
