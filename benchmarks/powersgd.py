"""What do low-rank gradients cost, beside torch's own hook, and where does the loss go?

Compression and communication: real gradients that are already there are handed to DistributedDataParallel
by a backward that computes nothing, and a step with each hook is compared with a step with a hook that does
nothing. Peers are torch's `powerSGD_hook` of the same rank, with and without batches of equal shapes, in the
one bucket that it needs on gloo. Settings alternate; the two that the goal compares run twice, for the A/A
spread. Goal: 1.6 times less than the better peer, rank by rank. Processor time (all threads, mean over ranks)
is that of the same steps, less that of the hook that does nothing.

Loss: equal models, seeds and batches for each method, dense in the first two steps as torch's hook demands.

Gates: in a step of ours the mean of what came is what all apply and the mean of what is left; after training
parameters are bit-identical on all ranks.

    python benchmarks/powersgd.py [--workload resnet18] [--rate unlimited] [--ranks 1 2] [--json PATH]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from itertools import islice
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab.bench.runner import machine
from gradwire_lab.bench.statistics import mixed, paired
from gradwire_lab.workloads.catalogue import workload

GOAL, DENSE_STEPS, ONE_BUCKET_MB = 1.6, 2, 1000
NOTHING, TORCH, BATCHED, OURS, ACP = "no hook", "torch", "torch, batched", "powersgd", "acpsgd"
SETTINGS = (NOTHING, TORCH, BATCHED, OURS, ACP)
AGAIN = " again"
Attach = Callable[[DistributedDataParallel, int], object]


def nothing(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that returns what it was given."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def torch_hook(ddp: DistributedDataParallel, rank: int, batched: bool) -> None:
    """The peer, as soon as it may start."""
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=DENSE_STEPS,
        batch_tensors_with_same_shape=batched,
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


ATTACH: dict[str, Attach] = {
    "ddp": lambda ddp, rank: None,
    NOTHING: lambda ddp, rank: ddp.register_comm_hook(None, nothing),
    TORCH: lambda ddp, rank: torch_hook(ddp, rank, batched=False),
    BATCHED: lambda ddp, rank: torch_hook(ddp, rank, batched=True),
    OURS: lambda ddp, rank: gradwire.attach(ddp, recipe=f"powersgd({rank=}, warmup_steps={DENSE_STEPS})"),
    ACP: lambda ddp, rank: gradwire.attach(ddp, recipe=f"acpsgd({rank=}, warmup_steps={DENSE_STEPS})"),
}


class Hand(torch.autograd.Function):
    """A backward that hands over gradients which are there already."""

    @staticmethod
    def forward(ctx: Any, given: "Given", *parameters: Tensor) -> Tensor:
        """Nothing to compute."""
        ctx.given = given
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """The next of the recorded gradients."""
        given = ctx.given
        given.turn += 1
        return None, *given.gradients[given.turn % len(given.gradients)]


class Given(nn.Module):
    """Parameters of the shapes of a model, and gradients that were recorded on it."""

    def __init__(self, gradients: list[list[Tensor]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros_like(each)) for each in gradients[0]])
        self.gradients, self.turn = gradients, 0

    def forward(self) -> Tensor:
        """Zero."""
        return Hand.apply(self, *self.weights)  # type: ignore[no-any-return,no-untyped-call]


def recorded(arguments: argparse.Namespace, count: int = 4) -> list[list[Tensor]]:
    """Gradients of this rank's first steps; every rank ends up with its own copy of other weights."""
    work = workload(arguments.workload)
    model = work.model(arguments.seed)
    optimizer = work.optimizer(model.parameters())
    found = []
    for batch in islice(work.batches(dist.get_rank(), dist.get_world_size(), arguments.seed), count):
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return found


def seconds(ddp: DistributedDataParallel, steps: int) -> tuple[float, float]:
    """The slowest rank's mean over `steps`, and the ranks' mean processor time."""
    wall, processor = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for _ in range(steps):
        ddp.zero_grad(set_to_none=False)
        loss = ddp()
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        loss.backward()
        wall += time.perf_counter() - start
        processor += time.process_time() - cpu_start
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    return float(wall) / steps, float(processor) / steps / dist.get_world_size()


Round = dict[str, tuple[float, float]]
"""Seconds and processor seconds of a step by setting."""


def costs(arguments: argparse.Namespace, rank: int, gradients: list[list[Tensor]]) -> list[Round]:
    """Round after round; then the gate."""
    models, wires = {}, {}
    for name in (*SETTINGS, TORCH + AGAIN, OURS + AGAIN):
        models[name] = DistributedDataParallel(Given(gradients), bucket_cap_mb=ONE_BUCKET_MB)
        wires[name] = ATTACH[name.removesuffix(AGAIN)](models[name], rank)
    for ddp in models.values():
        seconds(ddp, DENSE_STEPS + 3)
    rounds = [
        {name: seconds(models[name], arguments.steps) for name in mixed(list(models), number)}
        for number in range(arguments.repetitions)
    ]
    for name in (OURS, ACP):
        wire = wires[name]
        assert isinstance(wire, gradwire.Wire)
        require_conservation(models[name], wire, rank, name)
    return rounds


def _unsent(wire: gradwire.Wire) -> dict[str, Tensor]:
    (state,) = wire.state_dict().values()
    unsent: dict[str, Tensor] = state["memory"]
    return unsent


def require_conservation(ddp: DistributedDataParallel, wire: gradwire.Wire, rank: int, name: str) -> None:
    """One more step: avg(memory + gradient) = mean + avg(memory left), or the program ends.

    An element of what is left is x - P·q with r products of |P_i|·|q_j| <= ‖x‖, and so is the mean's:
    2(r + 1) roundings; W + 2 more of the averages and of the compensation. All relative to the parameter's
    norm.
    """
    unit_roundoff, world = torch.finfo(torch.float32).eps / 2, dist.get_world_size()
    before = _unsent(wire)
    ddp.zero_grad(set_to_none=False)
    ddp().backward()
    after, given = _unsent(wire), ddp.module
    assert isinstance(given, Given)
    came = given.gradients[given.turn % len(given.gradients)]
    for (key, parameter), gradient in zip(given.named_parameters(), came, strict=True):
        assert parameter.grad is not None
        none = torch.zeros_like(gradient)  # of what travels densely
        x = gradient.double() + before.get(key, none).double().view_as(gradient)
        apart = x - after.get(key, none).double().view_as(gradient)
        norm = x.square().sum()
        dist.all_reduce(apart)
        dist.all_reduce(norm, dist.ReduceOp.MAX)
        worst = float((apart / world - parameter.grad.double()).abs().max())
        if not worst <= (2 * rank + world + 4) * unit_roundoff * float(norm.sqrt()):
            raise SystemExit(
                f"{name}, rank {rank}: {key} loses {worst:.3g} in one element of norm {norm:.3g}"
            )


def require_equal_replicas(model: nn.Module, method: str) -> None:
    """Every bit of every parameter is rank 0's, or the program ends."""
    for key, parameter in model.named_parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        if not torch.equal(first.view(torch.int32), parameter.detach().view(torch.int32)):
            raise SystemExit(f"{method}: {key} differs between rank 0 and rank {dist.get_rank()}")


def loss_of(arguments: argparse.Namespace, method: str, rank: int, seed: int) -> float:
    """The mean loss of the last tenth of the steps, over ranks."""
    work = workload(arguments.loss_workload)
    ddp = DistributedDataParallel(work.model(seed), bucket_cap_mb=ONE_BUCKET_MB)
    optimizer = work.optimizer(ddp.parameters())
    ATTACH[method](ddp, rank)
    losses = []
    for batch in islice(work.batches(dist.get_rank(), dist.get_world_size(), seed), arguments.loss_steps):
        optimizer.zero_grad()
        loss = work.loss(ddp, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    require_equal_replicas(ddp.module, method)
    tail = torch.tensor([fmean(losses[-max(1, len(losses) // 10) :])])
    dist.all_reduce(tail)
    return float(tail) / dist.get_world_size()


def losses(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """By method and rank, one per seed."""
    seeds = range(arguments.seed, arguments.seed + arguments.loss_seeds)
    methods = [("ddp", 0), *((name, rank) for rank in arguments.ranks for name in (TORCH, OURS, ACP))]
    return {
        f"{name}, rank {rank}" if rank else name: [loss_of(arguments, name, rank, seed) for seed in seeds]
        for name, rank in methods
    }


def inside(arguments: argparse.Namespace) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    gradients = recorded(arguments)
    found = {
        "rounds": {rank: costs(arguments, rank, gradients) for rank in arguments.ranks},
        "losses": losses(arguments) if arguments.loss_steps else {},
        "elements": sum(each.numel() for each in gradients[0]),
    }
    if dist.get_rank() == 0:
        arguments.inside.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def launch(argv: Iterable[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Two ranks on the link."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "gradwire", "net", "run", "--workers", "2"]
        command += ["--rate", arguments.rate, "--", sys.executable, __file__, *argv, "--inside", str(path)]
        subprocess.run(command, check=True)
        document: dict[str, Any] = json.loads(path.read_text())
        return document


def compared(rounds: list[Round]) -> dict[str, Any]:
    """Medians without what a step costs anyway, and paired ratios to ours."""
    names = [name for name in rounds[0] if name != NOTHING]
    net = {name: [each[name][0] - each[NOTHING][0] for each in rounds] for name in names}
    processor = {name: [each[name][1] - each[NOTHING][1] for each in rounds] for name in names}
    pairs = {f"{peer} / {mine}": (peer, mine) for mine in (OURS, ACP) for peer in (TORCH, BATCHED)}
    pairs |= {f"{name} / {name} (A/A)": (name + AGAIN, name) for name in (TORCH, OURS)}
    return {
        "median_s": {name: median(values) for name, values in net.items()},
        "processor_median_s": {name: median(values) for name, values in processor.items()},
        "step_median_s": {name: median(each[name][0] for each in rounds) for name in rounds[0]},
        "ratios": {key: asdict(paired(net[top], net[bottom])) for key, (top, bottom) in pairs.items()},
        "whole step": {
            key: asdict(paired([r[top][0] for r in rounds], [r[bottom][0] for r in rounds]))
            for key, (top, bottom) in pairs.items()
        },
    }


def table(results: dict[str, Any]) -> Table:
    """A line per rank and pair."""
    view = Table(title="compression + communication per step", box=box.SIMPLE_HEAD, pad_edge=False)
    view.add_column("rank")
    view.add_column("pair", no_wrap=True)
    for head in ("ms", "ms", "ratio", "95 %", "ratio of whole steps", "CPU ms", "CPU ms"):
        view.add_column(head, justify="right", no_wrap=True)
    for rank, result in results.items():
        for key, ratio in result["ratios"].items():
            top, bottom = key.removesuffix(" (A/A)").split(" / ")
            top += AGAIN if key.endswith("(A/A)") else ""
            view.add_row(
                str(rank),
                key,
                *(f"{1e3 * result['median_s'][name]:.1f}" for name in (top, bottom)),
                f"{ratio['ratio']:.2f}",
                f"{ratio['low']:.2f} … {ratio['high']:.2f}",
                f"{result['whole step'][key]['ratio']:.2f}",
                *(f"{1e3 * result['processor_median_s'][name]:.1f}" for name in (top, bottom)),
            )
    return view


def loss_table(found: dict[str, list[float]]) -> Table:
    """A line per method."""
    view = Table(title="loss after equal steps, by seed", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("method", "mean", "less ddp's, mean ± deviation", "seeds"):
        view.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for name, values in found.items():
        less = [value - plain for value, plain in zip(values, found["ddp"], strict=True)]
        each = " ".join(f"{value:.4f}" for value in values)
        view.add_row(name, f"{fmean(values):.4f}", f"{fmean(less):+.4f} ± {pstdev(less):.4f}", each)
    return view


def verdict(results: dict[str, Any]) -> str:
    """What became of the goal, against the better of the two peers."""
    lines = []
    for rank, result in results.items():
        best = min(result["ratios"][f"{peer} / {OURS}"]["ratio"] for peer in (TORCH, BATCHED))
        met = "met" if best >= GOAL else "missed"
        lines.append(f"goal, rank {rank}: {GOAL} times less than the better peer: {best:.2f}, {met}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="resnet18")
    parser.add_argument("--rate", default="unlimited", help="of the link, as `gradwire net run` has it")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="of each setting, in each repetition")
    parser.add_argument("--loss-workload", default="resnet_demo")
    parser.add_argument("--loss-steps", type=int, default=150, help="0 leaves the losses out")
    parser.add_argument("--loss-seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments)
        return
    found = launch(sys.argv[1:], arguments)
    results = {rank: compared(rounds) for rank, rounds in found["rounds"].items()}
    console = Console(width=max(Console().width, 120))
    console.print(table(results))
    if found["losses"]:
        console.print(loss_table(found["losses"]))
    print(f"{arguments.workload}, {found['elements']:,} elements, link {arguments.rate}\n{verdict(results)}")
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("json", "inside")}
        document = {"settings": settings, "machine": machine(), "results": results, "found": found}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
