"""Ring or tree on NCCL: a group set up for each, and a switch between them.

NCCL reads `NCCL_ALGO` while a communicator is set up, which it does when a group is first used. Tyagi and
Swany 2024 (section 3-E) set the variable and start the program again; two groups that live side by side need
neither that nor a pause. What they cost is a communicator's device memory each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from gradwire.comm.base import Algorithm, Broadcasting, Comm, Pending

NCCL_ALGO = "NCCL_ALGO"
NAMES: Mapping[Algorithm, str] = {"ring": "RING", "tree": "TREE"}
"""What NCCL calls the algorithms that it has; for a star there are our own hops."""


def by_algorithm(make: Callable[[], Comm], like: Tensor) -> dict[Algorithm, Comm]:
    """A comm for each algorithm that NCCL has, set up and used once. A collective: call it on all ranks.

    `make` returns a comm over a new group; `like` is any tensor on this rank's device. The variable is the
    process's own: no other thread may set up a communicator meanwhile. Afterwards it is what it was.

    Example::

        make = lambda: ProcessGroupComm(dist.new_group(backend="nccl"))
        comm = Switched(default, by_algorithm(make, torch.empty(0, device=device)))
        comm.all_reduce(gradient, "tree")
    """
    made: dict[Algorithm, Comm] = {}
    for algorithm, name in NAMES.items():
        with _environment(NCCL_ALGO, name):
            comm = make()
            comm.all_reduce(like.new_zeros(1)).wait()
        made[algorithm] = comm
    return made


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Switched:
    """A `Comm` that hands every all-reduce to the comm set up for its algorithm, and all else to `default`.

    A switch costs nothing and may come with any collective, as long as all ranks make it with the same one.
    """

    def __init__(self, default: Comm, by_algorithm: Mapping[Algorithm, Comm]) -> None:
        self._default, self._by_algorithm = default, dict(by_algorithm)
        self.rank, self.world = default.rank, default.world

    def all_reduce(self, tensor: Tensor, algorithm: Algorithm = "library") -> Pending:
        """See `Comm.all_reduce`. For an algorithm without a comm of its own it is the default's hops."""
        if algorithm in self._by_algorithm:
            return self._by_algorithm[algorithm].all_reduce(tensor)
        return self._default.all_reduce(tensor, algorithm)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_gather`."""
        return self._default.all_gather(out, tensor)

    def broadcast(self, tensor: Tensor, src: int, algorithm: Broadcasting = "library") -> Pending:
        """See `Comm.broadcast`."""
        return self._default.broadcast(tensor, src, algorithm)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_to_all`."""
        return self._default.all_to_all(out, tensor)

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Pending:
        """See `Comm.shift`."""
        return self._default.shift(out, tensor, by)
