"""A training on two machines, as in `docs/two-machines.md`; it prints at which ports this machine listens."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.models import digest, optimizer_of, perceptron, train

LISTENS = "0A"


def listening() -> list[tuple[str, int]]:
    """Addresses and ports of this network namespace, over IPv4."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    found = []
    for row in rows:
        if row[3] == LISTENS:
            address, port = row[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def main() -> None:
    """Train, and tell."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(model)
    wire = gradwire.attach(model, optimizer, "int8")
    train(model, optimizer, range(20))
    report = wire.report()
    told = {
        "host": socket.gethostname(),
        "digest": digest(model),
        "step": report.step,
        "ranks": dist.get_world_size(),
        "listening": listening(),
    }
    print("TOLD " + json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
