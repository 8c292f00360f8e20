"""A rank's environment, cores and command, and its questions about the network it lives in."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath

from gradwire.environment import COMPILES_FIRST, RANKS_HERE
from gradwire_lab.emulate.link import WIRE_VARIABLE, Counters
from gradwire_lab.emulate.sandbox import INSIDE
from gradwire_lab.emulate.topology import read_counters

INTERFACE_VARIABLE = "GRADWIRE_INTERFACE"
"""Names the interface whose counters are the rank's; absent in backend mode."""


def _torchrun(base: Mapping[str, str], rank: int, workers: int, host: str, port: int) -> dict[str, str]:
    # Every rank is a node, unless `node_variables` say otherwise.
    variables = {
        **{
            key: value
            for key, value in base.items()
            if key not in (INSIDE, INTERFACE_VARIABLE, WIRE_VARIABLE)
        },
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        RANKS_HERE: str(workers),
        **node_variables(rank, workers, 1),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(workers),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    variables.setdefault("OMP_NUM_THREADS", "1")
    # What runs here is timed, and would be dense at first on an empty cache.
    variables.setdefault(COMPILES_FIRST, "1")
    return variables


def namespace_variables(
    base: Mapping[str, str], rank: int, workers: int, port: int, host: str, interface: str
) -> dict[str, str]:
    """Environment of a rank in a namespace of its own: `base`, torchrun's variables for `rank` of `workers`
    with the master at `host` and `port`, and the network `interface` of the namespace.
    """
    sockets = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return {**_torchrun(base, rank, workers, host, port), **sockets, INTERFACE_VARIABLE: interface}


def node_variables(rank: int, workers: int, per_node: int) -> dict[str, str]:
    """Torchrun's variables of nodes for `rank` of `workers`, where ranks are numbered node by node,
    `per_node` on each.

    >>> node_variables(3, 4, 2)["LOCAL_RANK"], node_variables(3, 4, 2)["GROUP_RANK"]
    ('1', '1')
    """
    return {
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "GROUP_WORLD_SIZE": str(workers // per_node),
    }


def backend_variables(
    base: Mapping[str, str], rank: int, workers: int, port: int, wire: str
) -> dict[str, str]:
    """Environment of a rank that shares the loopback with the others and is slowed by its process group:
    `base`, torchrun's variables for `rank` of `workers` at `port`, and the path `wire` of the file that
    has rate and delay.
    """
    common = _torchrun(base, rank, workers, "127.0.0.1", port)
    return {**common, "GLOO_SOCKET_IFNAME": "lo", WIRE_VARIABLE: wire}


def share(rank: int, workers: int, cores: Sequence[int]) -> set[int]:
    """The cores of `rank` among `workers`: every rank gets as many of `cores`, neighbours; all of them if
    there are fewer than ranks.

    Ranks that wander over shared cores slow each other down: on a virtual machine a step of plain DDP took up
    to a third longer, on an unshaped link.

    >>> share(1, 2, [0, 1, 2, 3, 4]), share(1, 2, [3])
    ({2, 3}, {3})
    """
    each = len(cores) // workers
    return set(cores[rank * each : (rank + 1) * each] if each else cores)


def sharing(workers: int) -> int:
    """Number of ranks that share one rank's cores, if this process starts `workers` ranks."""
    if not hasattr(os, "sched_getaffinity"):
        return workers
    return 1 if len(os.sched_getaffinity(0)) >= workers else workers


def cores_of(rank: int, workers: int) -> set[int]:
    """Cores of this process that belong to the rank; empty if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    return share(rank, workers, sorted(os.sched_getaffinity(0)))


@contextmanager
def on_cores_of(rank: int, workers: int) -> Iterator[None]:
    """Processes that this thread starts inside the block run on the rank's cores; no-op where unknown."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores_of(rank, workers))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


SHIM = "gradwire_lab.emulate.shim"
_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_TAKES_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def through_shim(argv: Sequence[str]) -> list[str]:
    """Put the shim in front of the script, module or code that a command names.

    The shim puts the delaying backend in place before the script runs.

    >>> through_shim(["python", "-u", "train.py", "--lr", "0.1"])
    ['python', '-u', '-m', 'gradwire_lab.emulate.shim', 'train.py', '--lr', '0.1']
    """
    words = list(argv)
    if not words:
        raise ValueError("the command is empty")
    if words[0] != sys.executable and not _PYTHON.fullmatch(PurePath(words[0]).name):
        raise ValueError(
            f"command={words[0]!r}: without network namespaces only Python programs can be slowed down; "
            "write it as: python script.py … or python -m module …"
        )
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c"):
        at += 2 if words[at] in _TAKES_VALUE else 1
    if at == len(words):
        raise ValueError("the command names no script: write it as: python script.py … or python -m module …")
    if SHIM in words[at : at + 2]:
        return words
    return [*words[:at], "-m", SHIM, *words[at:]]


def counters() -> Counters | None:
    """Bytes at this rank's interface so far, or None outside of an emulated network (about 30 µs)."""
    interface = os.environ.get(INTERFACE_VARIABLE)
    return None if interface is None else read_counters(interface)


def backend() -> str:
    """The name to give `init_process_group`: `gloo`, or the delaying backend where only that is possible."""
    if WIRE_VARIABLE not in os.environ:
        return "gloo"
    from gradwire_lab.emulate.delayed_group import register

    return register()
