"""Does compression between nodes keep native HSDP's loss?

Two nodes of two ranks train a transformer over characters. Every rank is a process over gloo. Native HSDP is
`fully_shard` on the mesh of nodes by ranks. Ours is `fully_shard` inside a node and a recipe between nodes.
Both start from equal weights and see equal batches. The gap is the mean difference of final losses (the last
tenth of the steps), seed by seed, beside twice its standard error; a gap below that counts as the same loss.

Each finished training is a line of `--runs`, and is not repeated when the command is given again: a run that
was interrupted goes on. On two cores it takes hours.

    python -m benchmarks.hsdp_loss [--seeds 3] [--steps 250] [--runs FILE] [--report PATH] [--json PATH]
"""

import argparse
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LinearLR

import gradwire
from gradwire_lab.workloads import catalogue

NODES, PER_NODE = 2, 2
NATIVE = "native HSDP"
RECIPES = ("int8", "powersgd", "scalecom(warmup_steps=12)", "covap(interval=4)", "topk(ratio=0.01)")
"""ScaleCom begins with 200 dense steps by default, which would be all of a short run."""


@dataclass(frozen=True)
class Run:
    """One training: what has to be repeated where any of it differs, and the loss of each step."""

    recipe: str
    seed: int
    steps: int
    losses: list[float]
    seconds: float
    decays: bool = False

    @property
    def final_loss(self) -> float:
        """The mean over the last tenth of the steps."""
        return fmean(self.losses[-max(1, len(self.losses) // 10) :])


class Sharded:
    """A model on this rank, by native HSDP or by a recipe between nodes."""

    def __init__(self, recipe: str, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=("nodes", "ranks"))
        inner = mesh if recipe == NATIVE else mesh["ranks"]
        for block in blocks:
            fully_shard(block, mesh=inner)
        self.model: nn.Module = fully_shard(model, mesh=inner)
        self._recipe, self._nodes = recipe, mesh["nodes"]
        self.wire: gradwire.Wire | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing where HSDP is native."""
        if self._recipe != NATIVE:
            self.wire = gradwire.attach(self.model, optimizer, self._recipe, replicas=self._nodes)

    def check(self) -> None:
        """Raise unless all ranks that hold the same shard have its bits."""
        parameters = (p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        words = torch.cat([p.detach().reshape(-1) for p in parameters]).view(torch.int32).long()
        ends = torch.stack([words.sum(), -words.sum()])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._nodes.get_group())
        if ends[0] != -ends[1]:
            raise AssertionError("replicas differ")


def train(recipe: str, seed: int, steps: int, *, decays: bool) -> list[float]:
    """The mean loss of all ranks in each step. The learning rate may decay to zero. A collective."""
    work = catalogue.workload("chargpt")
    model = work.model(seed)
    sharded = Sharded(recipe, model, list(model.get_submodule("layers").children()))
    optimizer = work.optimizer(sharded.model.parameters())
    sharded.attach(optimizer)
    schedule = LinearLR(optimizer, 1.0, 0.0 if decays else 1.0, total_iters=steps)
    batches: Iterator[tuple[Tensor, Tensor]] = work.batches(dist.get_rank(), dist.get_world_size(), seed)
    losses = torch.empty(steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss = work.loss(sharded.model, next(batches))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
    sharded.check()
    dist.all_reduce(losses)
    return [float(each) / dist.get_world_size() for each in losses]


def _rank(rank: int, port: int, recipe: str, seed: int, steps: int, decays: bool, out: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NODES * PER_NODE), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(PER_NODE))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    start_s = time.monotonic()
    losses = train(recipe, seed, steps, decays=decays)
    if rank == 0:
        run = Run(recipe, seed, steps, losses, time.monotonic() - start_s, decays)
        with Path(out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")
    dist.destroy_process_group()


def perform(recipe: str, seed: int, steps: int, out: Path, *, decays: bool) -> None:
    """Train on new processes; a line of `out` is what remains."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spawned = multiprocessing.get_context("spawn")
    ranks = [
        spawned.Process(target=_rank, args=(rank, port, recipe, seed, steps, decays, str(out)))
        for rank in range(NODES * PER_NODE)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"{recipe}, seed {seed}: ranks ended with {[each.exitcode for each in ranks]}")


def done(path: Path, steps: int, *, decays: bool) -> dict[tuple[str, int], Run]:
    """Runs of as many steps with or without decay, by recipe and seed."""
    if not path.exists():
        return {}
    runs = [Run(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(run.recipe, run.seed): run for run in runs if (run.steps, run.decays) == (steps, decays)}


def report(runs: dict[tuple[str, int], Run], steps: int) -> str:
    """A table of recipes whose seeds native HSDP has trained, too."""
    lines = [
        f"# Loss of HSDP with compression between nodes, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`chargpt`, {NODES} nodes of {PER_NODE} ranks over gloo, {steps} steps, torch {torch.__version__}. "
        "Loss: the mean over ranks and the last tenth of the steps.",
        "",
        "| gradients between nodes | seeds | loss | gap to native | same within 2 standard errors |",
        "|---|---|---|---|---|",
    ]
    for recipe in dict.fromkeys(name for name, _seed in runs):
        seeds = sorted(seed for name, seed in runs if name == recipe and (NATIVE, seed) in runs)
        losses = [runs[recipe, seed].final_loss for seed in seeds]
        gaps = [runs[recipe, seed].final_loss - runs[NATIVE, seed].final_loss for seed in seeds]
        apart, same = "-", "-"
        if recipe != NATIVE and len(seeds) > 1:
            error = stdev(gaps) / len(gaps) ** 0.5
            apart = f"{fmean(gaps):+.4f} ± {error:.4f}"
            same = "yes" if fmean(gaps) <= 2 * error else "no"
        name = recipe if recipe == NATIVE else f"`{recipe}`"
        lines.append(f"| {name} | {len(seeds)} | {fmean(losses):.4f} | {apart} | {same} |" if seeds else "")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--decay", action="store_true", help="the learning rate falls to zero, in a line")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--runs", type=Path, default=Path("hsdp_loss.jsonl"), help="finished trainings")
    parser.add_argument("--only-report", action="store_true", help="train nothing")
    parser.add_argument("--report", type=Path, help="write the table to this file, too")
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    options = parser.parse_args()

    def so_far() -> dict[tuple[str, int], Run]:
        return done(options.runs, options.steps, decays=options.decay)

    # Seed by seed, so that an interrupted run has compared all recipes on some of them.
    for seed in range(0 if options.only_report else options.seeds):
        for recipe in (NATIVE, *options.recipes):
            if (recipe, seed) not in so_far():
                perform(recipe, seed, options.steps, options.runs, decays=options.decay)
                run = so_far()[recipe, seed]
                print(f"{recipe}, seed {seed}: {run.final_loss:.4f}, {run.seconds:.0f} s", flush=True)
    runs = so_far()
    text = report(runs, options.steps)
    print(text)
    if options.report is not None:
        options.report.write_text(text, encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(run) for run in runs.values()]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
