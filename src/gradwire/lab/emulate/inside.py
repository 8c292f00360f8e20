"""What a rank may ask about the network it lives in."""

import os

from gradwire.lab.emulate.link import Counters
from gradwire.lab.emulate.rank_env import INTERFACE_VARIABLE, WIRE_VARIABLE
from gradwire.lab.emulate.topology import read_counters


def counters() -> Counters | None:
    """Bytes at this rank's interface so far, or None outside of an emulated network (about 30 µs)."""
    interface = os.environ.get(INTERFACE_VARIABLE)
    return None if interface is None else read_counters(interface)


def backend() -> str:
    """The name to give `init_process_group`: `gloo`, or the delaying backend where only that is possible."""
    if WIRE_VARIABLE not in os.environ:
        return "gloo"
    from gradwire.lab.emulate.delayed_group import register

    return register()
