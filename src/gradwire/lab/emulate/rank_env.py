"""A rank's environment: what torchrun sets for one worker per node, and where to find the network."""

from collections.abc import Mapping

from gradwire.lab.emulate.sandbox import INSIDE

INTERFACE_VARIABLE = "GRADWIRE_INTERFACE"
"""Names the interface whose counters are the rank's; absent in backend mode."""
WIRE_VARIABLE = "GRADWIRE_WIRE"
"""Path of the file that holds the link of backend mode; absent in the other modes."""

RANKS_VARIABLE = "GRADWIRE_RANKS_HERE"
"""How many ranks share the cores that a rank may use, as `gradwire.kernels.slices` wants to know."""


def _torchrun(base: Mapping[str, str], rank: int, workers: int, host: str, port: int) -> dict[str, str]:
    # Every rank is a node: with LOCAL_WORLD_SIZE equal to the world size, gloo may use shared memory.
    variables = {
        **{
            key: value
            for key, value in base.items()
            if key not in (INSIDE, INTERFACE_VARIABLE, WIRE_VARIABLE)
        },
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        RANKS_VARIABLE: str(workers),
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(workers),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(workers),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    variables.setdefault("OMP_NUM_THREADS", "1")
    return variables


def namespace(
    base: Mapping[str, str], rank: int, workers: int, port: int, host: str, interface: str
) -> dict[str, str]:
    """Variables of a rank in a namespace of its own."""
    sockets = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return {**_torchrun(base, rank, workers, host, port), **sockets, INTERFACE_VARIABLE: interface}


def backend(base: Mapping[str, str], rank: int, workers: int, port: int, wire: str) -> dict[str, str]:
    """Variables of a rank that shares the loopback with the others and is slowed by its process group."""
    common = _torchrun(base, rank, workers, "127.0.0.1", port)
    return {**common, "GLOO_SOCKET_IFNAME": "lo", WIRE_VARIABLE: wire}
