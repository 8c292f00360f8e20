"""Addresses and host names of the ranks."""

import tempfile
from pathlib import Path

from gradwire.lab.emulate.kernel import bind_mount

LARGEST_WORLD = 250


def address(rank: int) -> str:
    """The rank's address inside of the emulated network."""
    return f"10.119.0.{rank + 1}"


def show_rank_names() -> None:
    """Put `rank0`, `rank1`, … into this sandbox's view of /etc/hosts.

    Without it every connection asks a name server that the ranks cannot reach, and torch warns. The mount
    namespace is private, so the machine's own file stays as it is.
    """
    own = Path("/etc/hosts")
    with tempfile.NamedTemporaryFile("w", prefix="gradwire-hosts-", encoding="utf-8") as file:
        file.write(own.read_text(encoding="utf-8").rstrip("\n") + "\n")
        for rank in range(LARGEST_WORLD):  # torch listens on IPv6 sockets and asks for mapped addresses
            file.write(f"{address(rank)} rank{rank}\n::ffff:{address(rank)} rank{rank}\n")
        file.flush()
        Path(file.name).chmod(0o644)
        bind_mount(file.name, str(own))  # the mount outlives the name in the temporary folder
