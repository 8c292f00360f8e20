"""Members in network namespaces, between two of which the link is cut for a while, one way or both.

    python -m tests.faults.cut_members FOLDER {one-way,both-ways}

Three members and a lighthouse, which all of them reach all the time. FOLDER gets what members note.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

from gradwire_lab import emulate
from gradwire_lab.emulate.topology import address
from tests.faults.scenes_members import trained
from tests.support.lighthouse import Lighthouse

NAMES = "abc"
PORT = 29510
ROUNDS = 12
CUT_S = 14.0
"""Longer than an exchange may take."""


def member(place: int, folder: Path, ways: str) -> None:
    """One that trains. The first two send each other nothing while there is a file that says so."""
    if place < (1 if ways == "one-way" else 2):
        threading.Thread(target=_cut, args=(folder, address(1 - place)), daemon=True).start()
    host = {"host": address(len(NAMES))}
    trained(PORT, NAMES[place], folder, ROUNDS, "int4", {**host, "timeout_s": 20.0}, pause_s=0.1)


def _cut(folder: Path, other: str) -> None:
    while not (folder / "cut").exists():
        time.sleep(0.02)
    # The loopback takes the packets, and nobody there wants them.
    subprocess.run(["ip", "route", "add", f"{other}/32", "dev", "lo"], check=True)
    time.sleep(CUT_S)
    subprocess.run(["ip", "route", "del", f"{other}/32", "dev", "lo"], check=True)


def launch(folder: Path, ways: str) -> None:
    """The network, the lighthouse and the members; returns when these have ended."""
    entered = emulate.enter("auto")
    with emulate.EmulatedNetwork(len(NAMES) + 1, emulate.EmulatedLink(), entered) as network:
        command = [sys.executable, "-m", "tests.faults.cut_members", str(folder), ways, "--place"]
        network.popen(len(NAMES), [*command, str(len(NAMES))])
        running = [network.popen(place, [*command, str(place)]) for place in range(len(NAMES))]
        notes = folder / f"{NAMES[0]}.jsonl"
        while not (notes.exists() and '"rounds": 3' in notes.read_text()) and running[0].poll() is None:
            time.sleep(0.02)
        (folder / "cut").touch()
        codes = [each.wait() for each in running]
    sys.exit(max(map(abs, codes)))


def main() -> None:
    """A member, the lighthouse, or the launcher of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("ways", choices=["one-way", "both-ways"])
    parser.add_argument("--place", type=int)
    asked = parser.parse_args()
    if asked.place is None:
        launch(asked.folder, asked.ways)
    elif asked.place < len(NAMES):
        member(asked.place, asked.folder, asked.ways)
    else:
        Lighthouse(at_least=2, address=(address(asked.place), PORT))
        threading.Event().wait()


if __name__ == "__main__":
    main()
