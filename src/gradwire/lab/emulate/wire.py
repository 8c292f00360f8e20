"""When the bytes of a transfer would have arrived, and handing its result over at that time."""

import atexit
import threading
import time
from collections.abc import Sequence
from typing import Any

from gradwire.comm.carried import Carried
from gradwire.lab.emulate.wire_file import WireFile

BOTH = ("out", "in")


class Wire:
    """One rank's cable: full duplex, and in each direction transfers go one after the other."""

    def __init__(self, file: WireFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._free_at_s = dict.fromkeys(BOTH, 0.0)
        self._carriers: set[threading.Thread] = set()
        # A thread that comes back from native code while the interpreter shuts down aborts the process.
        atexit.register(self._settle)

    def _settle(self, patience_s: float = 2.0) -> None:
        deadline_s = now_s() + patience_s
        for carrier in list(self._carriers):
            carrier.join(max(deadline_s - now_s(), 0.0))

    def reserve(self, hops: int, wire_bytes: float, directions: Sequence[str], now_s: float) -> float:
        """The time at which a transfer that is ready now has gone through; later ones queue behind it.

        Latency (`hops` times the delay) does not occupy the wire: the next transfer starts meanwhile.
        """
        rate_bit_per_s, delay_s = self._file.read()
        with self._lock:
            start_s = max(now_s, *(self._free_at_s[direction] for direction in directions))
            end_s = start_s + wire_bytes * 8 / rate_bit_per_s
            for direction in directions:
                self._free_at_s[direction] = end_s
        return end_s + hops * delay_s

    def deliver(
        self, work: Any, result: Any, hops: int, wire_bytes: float, directions: Sequence[str] = BOTH
    ) -> Carried:
        """A work that completes when the wire has carried what `work` has moved over the loopback.

        The wire is taken when the loopback is done, not before: only then have all ranks joined. A thread per
        transfer, since a receive may wait for ever while others must complete.
        """

        def collective() -> Any:
            work.wait()
            time.sleep(max(self.reserve(hops, wire_bytes, directions, now_s()) - now_s(), 0.0))
            return result

        delivered = Carried(collective)

        def carry() -> None:
            delivered.carry()
            self._carriers.discard(threading.current_thread())

        carrier = threading.Thread(target=carry, name="gradwire-wire", daemon=True)
        self._carriers.add(carrier)
        carrier.start()
        return delivered


def now_s() -> float:
    """The clock of the wire."""
    return time.monotonic()
