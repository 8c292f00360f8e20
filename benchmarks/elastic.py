"""Rounds whose replicas are killed and come back: gradwire's `members=` beside torchft's own DiLoCo.

    python -m benchmarks.elastic --rounds 40 --kill-every 10 --recipe int4

Processes on this machine share it, over the loopback or over an emulated link:

    gradwire net run --mode relay --rate 100mbit --delay 50ms -- python -m benchmarks.elastic …

Both sides train the same model on the same data with the same kills, which come after the same rounds of the
first member. For each round of the members that live, a line says how long it took and what it sent. The last
lines say how long the round in which a member died took, and how many files and threads there were after the
second round and at the end.

Needs torchft (`pip install 'gradwire[elastic]'`). `--peers gradwire` leaves torchft's DiLoCo out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import gradwire
from gradwire.lab.workloads.catalogue import workload

EVERY = 30


def main() -> None:
    """Run each peer with the kills, and print what its members have noted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--kill-every", type=int, default=10)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--model", default="chargpt")
    parser.add_argument("--heartbeat-timeout", type=float, default=3.0)
    parser.add_argument("--peers", nargs="+", default=["gradwire", "torchft"])
    parser.add_argument("--member", nargs=4, metavar=("PEER", "NAME", "URL", "NOTES"))
    asked = parser.parse_args()
    if asked.member:
        peer, name, url, notes = asked.member
        _MEMBERS[peer](asked, name, url, Path(notes))
        return
    for peer in asked.peers:
        with tempfile.TemporaryDirectory() as folder:
            play(asked, peer, Path(folder))


def play(asked: argparse.Namespace, peer: str, folder: Path) -> None:
    """Start a lighthouse and all members; kill one now and then, and start it again three rounds later."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=10_000,
        heartbeat_timeout_ms=round(1e3 * asked.heartbeat_timeout),
    )
    url = f"http://127.0.0.1:{server.address().rpartition(':')[2].strip('/')}"
    names = [f"site-{number}" for number in range(asked.members)]

    def start(name: str) -> subprocess.Popen[bytes]:
        own = ["--member", peer, name, url, str(folder / f"{name}.jsonl")]
        return subprocess.Popen([sys.executable, "-m", "benchmarks.elastic", *sys.argv[1:], *own])

    running, down = {name: start(name) for name in names}, dict[str, int]()
    first, seen, kills = folder / f"{names[0]}.jsonl", 0, list[tuple[str, float]]()
    try:
        while running[names[0]].poll() is None:
            time.sleep(0.05)
            now = len(noted(first))
            for name in [name for name, since in down.items() if now >= since + 3]:
                running[name] = start(name)
                del down[name]
            if now != seen and now % asked.kill_every == asked.kill_every - 1 and now < asked.rounds - 4:
                victim = names[1 + (now // asked.kill_every) % (len(names) - 1)]
                running[victim].send_signal(signal.SIGKILL)
                running[victim].wait()
                kills.append((victim, time.time()))
                down[victim] = now
            seen = now
    finally:
        for process in running.values():
            process.kill()
            process.wait()
        server.shutdown()
    report(peer, noted(first), kills)


def noted(path: Path) -> list[dict[str, Any]]:
    """The rounds that a member has noted."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def report(peer: str, rounds: list[dict[str, Any]], kills: list[tuple[str, float]]) -> None:
    """Print the rounds of the first member, and those in which somebody died."""
    for each in rounds:
        print(f"{peer}: {each}")
    hit = {next((i for i, each in enumerate(rounds) if each["at"] > at), -1) for _name, at in kills}
    usual = median(each["seconds"] for i, each in enumerate(rounds) if i not in hit)
    told = ", ".join(f"{rounds[i]['seconds']:.2f}" for i in sorted(hit - {-1}))
    print(f"{peer}: a round takes {usual:.2f} s, one with a death {told or '-'} s")
    if len(rounds) > 2:
        second, last = rounds[1], rounds[-1]
        print(f"{peer}: files {second['files']} to {last['files']}, threads {second['threads']} to ", end="")
        print(f"{last['threads']}, loss {last['loss']:.4f}")


class Notes:
    """A line for each round: seconds beside computation, loss, files, threads."""

    def __init__(self, path: Path) -> None:
        self.path, self.round_s = path, 0.0

    def write(self, loss: float, sent: float, members: int) -> None:
        """Note a round that took `round_s` seconds."""
        told = {
            "seconds": self.round_s,
            "loss": loss,
            "bytes": sent,
            "members": members,
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "at": time.time(),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(told) + "\n")


def _job(asked: argparse.Namespace, name: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """The model, its optimizer, and a function that makes a backward pass and returns the loss."""
    torch.set_num_threads(1)
    task, number = workload(asked.model), int(name.rpartition("-")[2])
    model = task.model(seed=0)
    data = task.batches(number, asked.members, seed=0)
    optimizer = task.optimizer(model.parameters())

    def backward() -> float:
        optimizer.zero_grad()
        loss = task.loss(model, next(data))
        loss.backward()
        return float(loss)

    return model, optimizer, backward


def _gradwire(asked: argparse.Namespace, name: str, url: str, path: Path) -> None:
    model, optimizer, backward = _job(asked, name)
    members, notes = gradwire.members.torchft(url, name=name), Notes(path)
    wire = gradwire.outer(model, optimizer, asked.recipe, every=EVERY, members=members)
    seen = wire.rounds
    while wire.rounds < asked.rounds:
        loss = backward()
        start_s = time.perf_counter()
        optimizer.step()
        notes.round_s = time.perf_counter() - start_s
        if wire.rounds != seen:
            seen = wire.rounds
            notes.write(loss, wire.report().wire_bytes_per_step, len(wire.members))
    wire.detach()


def _torchft(asked: argparse.Namespace, name: str, url: str, path: Path) -> None:
    from datetime import timedelta

    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    model, optimizer, backward = _job(asked, name)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=name,
        lighthouse_addr=url,
        timeout=timedelta(seconds=60),
    )
    notes = Notes(path)
    floats = sum(each.numel() for each in model.parameters())
    with DiLoCo(manager, [model], optimizer, outer, sync_every=EVERY):
        while manager.current_step() < asked.rounds:
            seen, loss = manager.current_step(), backward()
            start_s = time.perf_counter()
            optimizer.step()
            notes.round_s = time.perf_counter() - start_s
            if manager.current_step() != seen:
                count = max(manager.num_participants(), 1)
                notes.write(loss, 8.0 * floats * (count - 1) / count, count)
    manager.shutdown()


_MEMBERS = {"gradwire": _gradwire, "torchft": _torchft}

if __name__ == "__main__":
    main()
