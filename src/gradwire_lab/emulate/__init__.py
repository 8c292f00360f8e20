"""Slow networks on one machine: namespaces that the kernel shapes, or a process group that waits.

    mode = emulate.enter()                       # the command continues inside of a sandbox
    with emulate.EmulatedNetwork(4, emulate.EmulatedLink(emulate.parse_rate("200mbit")), mode) as network:
        ranks = [network.popen(rank, [sys.executable, "train.py"]) for rank in range(4)]

Nothing here imports torch, except `backend`, and ranks, where the delaying process group is needed.
"""

from gradwire_lab.emulate.fork import prepare_ranks
from gradwire_lab.emulate.link import Counters, EmulatedLink, parse_delay, parse_rate
from gradwire_lab.emulate.network import EmulatedNetwork, free_port
from gradwire_lab.emulate.ranks import backend, counters
from gradwire_lab.emulate.sandbox import MODES, enter, why_not

__all__ = [
    "MODES",
    "Counters",
    "EmulatedLink",
    "EmulatedNetwork",
    "backend",
    "counters",
    "enter",
    "free_port",
    "parse_delay",
    "parse_rate",
    "prepare_ranks",
    "why_not",
]
