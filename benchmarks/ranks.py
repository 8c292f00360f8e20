"""Ranks of a benchmark on an emulated network: the program itself once more, with `--out`."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire_lab import emulate
from gradwire_lab.bench.statistics import mixed


def told_by_ranks(workers: int, rate: str, delay: str = "0", nodes: int | None = None) -> Any:
    """Start this program's ranks with its own options and `--out FILE`; the JSON that rank 0 writes there.

    `rate` and `delay` (one way) are those of each rank's link, or with `nodes` of each node's, as
    `gradwire net` reads them. Raises `RuntimeError` if a rank fails.
    """
    link = emulate.EmulatedLink(emulate.parse_rate(rate), emulate.parse_delay(delay))
    mode = emulate.enter("auto")
    with (
        tempfile.TemporaryDirectory() as folder,
        emulate.EmulatedNetwork(workers, link, mode, nodes) as network,
    ):
        out = Path(folder, "told.json")
        command = [sys.executable, *sys.argv, "--out", str(out)]
        ranks: list[subprocess.Popen[Any]] = [network.popen(rank, command) for rank in range(workers)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return json.loads(out.read_text(encoding="utf-8"))


class Stepping(Protocol):
    """One way to train, on one rank."""

    def step(self) -> None:
        """Forward, backward, update."""

    def check(self) -> None:
        """Raises what is wrong with it by now."""


def timed_in_turns(
    settings: Mapping[str, Stepping], rounds: int, steps: int, *, warm_up: int
) -> dict[str, dict[str, list[float]]]:
    """On each rank: train all settings in turns, `steps` a round, in another order each round.

    By setting and round, per step: `step_s` of the slowest rank, `cpu_s` of all ranks together, and the
    `bytes` that leave a rank by its interface, the mean of all.
    """
    rows: dict[str, dict[str, list[float]]] = {
        name: {"step_s": [], "cpu_s": [], "bytes": []} for name in settings
    }
    for setting in settings.values():
        for _ in range(warm_up):
            setting.step()
    for number in range(rounds):
        for name, setting in mixed(list(settings.items()), number):
            dist.barrier()
            before = emulate.counters()
            start_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                setting.step()
            spent = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
            worked = torch.tensor([time.process_time() - cpu_s], dtype=torch.float64)
            dist.barrier()  # what is in the queue still has left by then
            after = emulate.counters()
            assert before is not None
            assert after is not None
            sent = torch.tensor([float((after - before).tx_bytes)], dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            dist.all_reduce(worked)
            dist.all_reduce(sent)
            rows[name]["bytes"].append(float(sent) / steps / dist.get_world_size())
            rows[name]["step_s"].append(float(spent) / steps)
            rows[name]["cpu_s"].append(float(worked) / steps)
            setting.check()
    return rows
