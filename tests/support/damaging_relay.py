"""The relay of emulated networks, as a line that fails: it flips bits, resets connections, or goes silent.

Runs in the place of `gradwire_lab.emulate.relay`, whose path is in RELAY; DAMAGE says what happens, as JSON:
`what` is "flip" (in one of `every` large packets, at random), "reset" (the first large packet), "silence"
(from there on no large packet is delivered), or "half-open" (from there on no packet from the first node of
`way` to the second, acknowledgements too), all after `after` large packets. Each act is a line of the file
`log`; a half-open line is one.
TCP does not notice a flip, as it would not notice one in a network card that checks for it: the packets come
from the same machine, and are said to be checked.
"""

import importlib.util
import json
import os
import random
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("relay", os.environ["RELAY"])
assert _spec is not None
assert _spec.loader is not None
relay = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(relay)

DAMAGE = json.loads(os.environ["DAMAGE"])
VIRTIO_BYTES, NEEDS_CHECKSUM, RST = 10, 1, 0x04


class FailingLine(relay.DelayLine):
    """Damages large packets, those with payloads of more than 1000 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(DAMAGE.get("seed", 0))
        self._large = 0
        self._is_half_open = False
        self._way = [node + 1 for node in DAMAGE.get("way", ())]  # the last bytes of their addresses

    def push(self, packet: bytes, now_s: float) -> None:
        """As `DelayLine.push`."""
        ip = VIRTIO_BYTES
        tcp = ip + 4 * (packet[ip] & 15)
        payload = tcp + 4 * (packet[tcp + 12] >> 4)
        if self._is_half_open and list(packet[ip + 15 : ip + 20 : 4]) == self._way:
            return
        if packet[ip + 9] == 6 and len(packet) - payload > 1000:
            self._large += 1
            since = self._large - DAMAGE["after"]
            if since >= 0:
                packet = self._damaged(bytearray(packet), tcp, payload, since)
        if packet:
            super().push(bytes(packet), now_s)

    def _damaged(self, packet: bytearray, tcp: int, payload: int, since: int) -> bytearray:
        match DAMAGE["what"]:
            case "flip" if self._random.random() < 1.0 / DAMAGE["every"]:
                # In the second half: at the start of a message lie the transport's own words.
                at = self._random.randrange((payload + len(packet)) // 2, len(packet))
                packet[at] ^= 1 << self._random.randrange(8)
                self._note("flip" if packet[0] & NEEDS_CHECKSUM else "flip that TCP will notice")
            case "reset" if since == 0:
                packet[tcp + 13] |= RST
                self._note("reset")
            case "half-open" if since == 0:
                self._is_half_open = True
                self._note("half-open")
            case "silence":
                self._note("silence")
                packet.clear()
        return packet

    def _note(self, what: str) -> None:
        with Path(DAMAGE["log"]).open("a", encoding="utf-8") as log:
            log.write(what + "\n")


if __name__ == "__main__":
    relay.DelayLine = FailingLine
    relay.run(int(sys.argv[1]), int(sys.argv[2]))
