"""A rank whose interpreter ends while a thread of gloo is inside a callback of ours."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from gradwire.comm import ProcessGroupComm


class Late:
    """Goes together with the modules, so that the end of the interpreter takes a second."""

    def __del__(self, sleep: Any = time.sleep) -> None:
        sleep(1.0)


def main(rank: int, world: int, meeting: str) -> None:
    """Nobody waits for the sum on rank 0, as for a step that was given up; the callback is slow."""
    store = dist.FileStore(meeting, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    comm, entered = ProcessGroupComm(group), threading.Event()
    comm.all_reduce(torch.ones(3)).wait()

    def called() -> None:
        assert threading.current_thread() is not threading.main_thread()
        entered.set()
        time.sleep(0.5)

    if rank:
        time.sleep(0.5)  # so that rank 0 is called back later, on gloo's thread
    pending = comm.all_reduce(torch.ones(3))
    if rank:
        pending.wait()
    else:
        pending.then(called)
        entered.wait()
        sys.late = Late()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
