"""The slow twin of `predict`: everything in whole seconds, looked at second by second."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Unit:
    """Whole seconds; `rounds` one after another, each on the wire for so long, and then `latency` more."""

    ready: int
    encode: int
    rounds: list[int]
    decode: int
    latency: int = 0
    left: int = 0
    state: str = "waiting"


@dataclass
class Clockwork:
    """A worker and a network that are told the time; nothing here looks ahead."""

    units: Sequence[Unit]
    posted: deque[tuple[str, int]] = field(default_factory=deque)
    wire: deque[list[int]] = field(default_factory=deque)  # [unit, round, seconds left]
    under_way: dict[int, list[int]] = field(default_factory=dict)  # by unit: [round, seconds left]
    job: tuple[str, int] | None = None
    left: int = 0
    next_round: int = 0

    def run(self) -> int:
        """When everything has been decoded."""
        now = 0
        while any(unit.state != "done" for unit in self.units):
            for number, unit in enumerate(self.units):
                if unit.ready == now:
                    self.posted.append(("start", number))
            self.settle()
            if all(unit.state == "done" for unit in self.units):
                break
            now += 1
            self.left = max(0, self.left - 1)
            if self.wire:
                self.wire[0][2] -= 1
            for each in self.under_way.values():
                each[1] -= 1
            assert now < 10_000
        return now

    def settle(self) -> None:
        """Everything that happens at this moment."""
        while self.end_of_round() or self.worker():
            pass

    def end_of_round(self) -> bool:
        if self.wire and self.wire[0][2] == 0:
            number, round_, _left = self.wire.popleft()
            self.under_way[number] = [round_, self.units[number].latency]
            return True
        number = min((unit for unit, (_round, left) in self.under_way.items() if left == 0), default=-1)
        if number < 0:
            return False
        round_, _left = self.under_way.pop(number)
        if round_ == len(self.units[number].rounds) - 1:
            self.posted.append(("decode", number))
        else:
            self.next_round = round_ + 1
            self.issue(number)
        return True

    def issue(self, number: int) -> None:
        self.wire.append([number, self.next_round, self.units[number].rounds[self.next_round]])
        is_last = self.next_round == len(self.units[number].rounds) - 1
        self.job = None if is_last else ("wait", number)

    def worker(self) -> bool:
        if self.job is None and self.posted:
            what, number = self.posted.popleft()
            self.job, self.left = (
                (what, number),
                getattr(self.units[number], "encode" if what == "start" else what),
            )
            return True
        if self.job is None or self.job[0] == "wait" or self.left > 0:
            return False
        what, number = self.job
        if what == "start":
            self.next_round = 0
            self.issue(number)
        else:
            self.units[number].state, self.job = "done", None
        return True
