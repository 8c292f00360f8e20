"""A long cable in user space: delays every packet. For kernels without netem.

Runs as a program of its own (`relay.py TUN_FD CONTROL_FD`), so it imports only the standard library and
starts in milliseconds. It reads packets from a TUN device and writes them back later; the kernel then routes
them to their ranks. Each packet has a 10-byte header (virtio_net_hdr) with the work that the sender's kernel
left undone (checksum, segmentation). The header goes back unchanged with the packet, so that large segments
cross in one piece and no packet arrives with a checksum that was never computed.
"""

import contextlib
import ctypes
import os
import select
import struct
import sys
import time
from collections import deque

LARGEST_BYTES = 65536 + 64
_BATCH = 64
_HELD_BYTES_LIMIT = 512 * 1024**2


class DelayLine:
    """Packets in the order of their arrival, each with the time at which it is due."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.held_bytes = 0
        self._last_due_s = 0.0
        self._packets: deque[tuple[float, bytes]] = deque()

    def push(self, packet: bytes, now_s: float) -> None:
        """Take in a packet that arrived at `now_s`."""
        # A delay that was made shorter must not let later packets overtake earlier ones.
        self._last_due_s = max(self._last_due_s, now_s + self.delay_s)
        self._packets.append((self._last_due_s, packet))
        self.held_bytes += len(packet)

    def pop(self, now_s: float) -> bytes | None:
        """The next packet if it is due."""
        if not self._packets or self._packets[0][0] > now_s:
            return None
        packet = self._packets.popleft()[1]
        self.held_bytes -= len(packet)
        return packet

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next packet is due; None when there is none."""
        return max(self._packets[0][0] - now_s, 0.0) if self._packets else None


def _read_some(tun: int, line: DelayLine) -> None:
    for _ in range(_BATCH):
        try:
            packet = os.read(tun, LARGEST_BYTES)
        except BlockingIOError:
            return
        line.push(packet, time.monotonic())


def _write_due(tun: int, line: DelayLine) -> None:
    while (packet := line.pop(time.monotonic())) is not None:
        try:
            os.write(tun, packet)
        except (BlockingIOError, InterruptedError):
            pass  # the kernel had no memory for it: a lost packet, as on any network
        except OSError as error:
            print(f"relay: a packet of {len(packet)} bytes was refused: {error}", file=sys.stderr)


def run(tun: int, control: int) -> None:
    """Forward until the control pipe is closed; every 8 bytes on it are a new delay in seconds."""
    line = DelayLine()
    os.set_blocking(tun, False)
    while True:
        sources = [control] if line.held_bytes > _HELD_BYTES_LIMIT else [control, tun]
        ready, _, _ = select.select(sources, [], [], line.wait_s(time.monotonic()))
        if control in ready:
            message = os.read(control, 8)
            if len(message) < 8:
                return
            (line.delay_s,) = struct.unpack("d", message)
        if tun in ready:
            _read_some(tun, line)
        _write_due(tun, line)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: wake on time, not up to 50 µs late
    with contextlib.suppress(OSError):  # only real root may
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a cable does not wait for a free processor
    run(int(sys.argv[1]), int(sys.argv[2]))
