"""JSON lines between the launcher and one worker: commands on one pipe, answers on another.

Standard output stays free for whatever a workload prints: it cannot corrupt an answer.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """One line of UTF-8; NaN and infinities become null, which JSON can carry."""
    return (json.dumps(_finite(message), separators=(",", ":")) + "\n").encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return (
            value if value - value == 0.0 else None
        )  # NaN and ±Inf are the floats that differ from themselves
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class Lines:
    """Reassembles lines from a non-blocking descriptor; owns the descriptor."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.closed = False
        self._rest = b""

    def read(self) -> list[Message]:
        """All complete messages available now; sets `closed` when the other side is gone."""
        try:
            chunk = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return []
        self.closed = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)


class WorkerEnd:
    """The worker's side: iterate over commands, `send` answers."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, encoding="utf-8")
        self._answers = answers

    def __iter__(self) -> Iterator[Message]:
        """Commands until the launcher closes its side: a worker never outlives its launcher while idle."""
        for line in self._commands:
            yield json.loads(line)

    def send(self, message: Message) -> None:
        """Write one whole line (blocking)."""
        data = encode(message)
        while data:
            data = data[os.write(self._answers, data) :]
