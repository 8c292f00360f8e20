"""Running one command on every rank until all have ended, or one has failed."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.lab.emulate.network import Network, end_all

_POLL_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """How a run ended: exit codes as a shell reports them, and the first rank that failed, if any did."""

    exit_codes: tuple[int, ...]
    failed_rank: int | None
    seconds_s: float

    @property
    def exit_code(self) -> int:
        """The failed rank's code, or 0."""
        return 0 if self.failed_rank is None else self.exit_codes[self.failed_rank]


def shell_code(returncode: int) -> int:
    """`subprocess` counts a death by signal n as -n, a shell as 128 + n."""
    return returncode if returncode >= 0 else 128 - returncode


def run_on_all(network: Network, argv: Sequence[str], grace_s: float = 5.0) -> Outcome:
    """Start `argv` on every rank and wait; when a rank fails, the others are ended after `grace_s`.

    The grace is for them to notice the failure, and to say so themselves.
    """
    start_s = time.monotonic()
    ranks = [network.popen(rank, argv) for rank in range(network.workers)]
    failed = _wait(ranks, None)
    if failed is not None:
        _wait(ranks, time.monotonic() + grace_s)
        end_all(ranks)
    codes = tuple(shell_code(process.wait()) for process in ranks)
    return Outcome(codes, failed, time.monotonic() - start_s)


def _wait(ranks: "list[subprocess.Popen[Any]]", deadline_s: float | None) -> int | None:
    """The first failed rank: once all have ended, at `deadline_s`, or (without one) when one fails."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0)), None)
        if all(code is not None for code in codes) or (failed is not None and deadline_s is None):
            return failed
        if deadline_s is not None and time.monotonic() > deadline_s:
            return failed
        time.sleep(_POLL_S)
