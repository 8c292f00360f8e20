"""FSDP2's own traffic in few bits: bytes, steps and loss beside stock FSDP2 and beside short wires.

Four ranks train a transformer over characters (2.4 M parameters), each layer sharded by itself. Peers are
stock FSDP2, twice; and wires of a few lines, which gather in a type and scatter by one all-to-all in it, with
sums in float32.

`--what steps`: ranks on an emulated network, each with a link of its own. Settings run in mixed order, round
by round, in the same processes. A step's time is the slowest rank's, bytes are those that leave a rank by its
interface, the mean of all. Beside them stands what rings would send of float32: 3(W - 1)/W · 4P. The bound
on a ratio of times is (t + B_peer/b) / (t + B_ours/b), with t the time of stock's step over an unslowed link,
and b the rate. Gathers of the backward pass overlap with it, which the bound leaves out.

`--what loss`: the loss on held-out text after training, seed by seed, minus stock's; beside it stock with
another order of summation (the float32 wire), and weights gathered in 4 bits, as one should not do.

Goals. Bytes: int8 both ways at most 1/3.7 of the rings', int4 with int8 at most 1/4.4. Steps at 200 Mbit/s:
at least 0.9 of the bound against each peer that computes in float32; over an unslowed link at most 1.10 of
stock's time. Loss: at most 0.01 (int8 both ways) and 0.02 (int4 with int8), each plus two standard errors.

    python benchmarks/fsdp_traffic.py --what steps [--rate 200mbit] [--rounds 7] [--steps 2] [--json PATH]
    python benchmarks/fsdp_traffic.py --what steps --rate 50mbit
    python benchmarks/fsdp_traffic.py --what loss [--seeds 3] [--train 600] [--json PATH]
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from ranks import timed_in_turns, told_by_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire.lab import emulate
from gradwire.lab.bench.statistics import paired
from gradwire.lab.workloads import catalogue
from gradwire.sources.fsdp.coding import Blocks

WORLD, WARM_UP = 4, 3
STOCK = "stock"
OURS = {
    "dense": ("dense", None),
    "bf16/bf16": ("bf16", "bf16"),
    "int8/int8": ("int8", "int8"),
    "int4/int8": ("int4", "int8"),
}
"""Scatter and gather, by name."""
GOALS = {"int8/int8": (3.7, 0.01), "int4/int8": (4.4, 0.02)}
"""Of the rings' bytes, and of loss."""
STEPS = (STOCK, "stock again", "wire in float32", "wire in bf16", *OURS, "stock, bf16", "int8/int8, bf16")
LOSSES = (STOCK, "wire in float32", "int8/int8", "int4/int8", "weights in int4")


class GatherIn:
    """Gathers in `dtype`: every rank sends its shard to all."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        mine = input_tensor.to(self.dtype, copy=True)
        all_of = torch.empty(output_tensor.numel(), dtype=self.dtype)
        dist.all_gather_single(all_of, mine, group=group)
        output_tensor.copy_(all_of)


class ScatterIn(GatherIn):
    """Scatters in `dtype`: one all-to-all, and a sum in float32."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        mine = input_tensor.to(self.dtype)
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=group)
        output_tensor.copy_(received.view(group.size(), -1).sum(0, dtype=torch.float32))


class GatherCodes(GatherIn):
    """Gathers weights themselves in 4 bits."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        coding, parts = Blocks("int4", 128), (input_tensor.numel(),)
        row = torch.empty(coding.row_bytes(parts, torch.float32), dtype=torch.uint8)
        coding.encode(input_tensor.clone(), row[None], parts, 0)
        rows = torch.empty(group.size(), row.numel(), dtype=torch.uint8)
        dist.all_gather_single(rows.view(-1), row, group=group)
        coding.decode(rows, output_tensor, parts)


def carry(model: nn.Module, gather: object, scatter: object) -> None:
    """Let two objects carry the traffic of all modules."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_custom_all_gather(gather)  # type: ignore[arg-type]
            each.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
            each.set_force_sum_reduction_for_comms(True)


class Setting:
    """One way to train, on one rank."""

    def __init__(self, name: str, seed: int) -> None:
        self._work = catalogue.workload("chargpt")
        model = self._work.model(seed)
        mesh = init_device_mesh("cpu", (WORLD,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if name.endswith(", bf16") else None)
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.model: nn.Module = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.optimizer = self._work.optimizer(self.model.parameters())
        self.wire: gradwire.Wire | None = None
        plain = name.removesuffix(", bf16")
        if plain in OURS:
            scatter, gather = OURS[plain]
            self.wire = gradwire.attach(self.model, self.optimizer, scatter, gather=gather)  # type: ignore[arg-type]
        elif plain == "weights in int4":
            carry(self.model, GatherCodes(torch.uint8), ScatterIn(torch.float32))
        elif plain.startswith("wire"):
            dtype = torch.float32 if plain.endswith("float32") else torch.bfloat16
            carry(self.model, GatherIn(dtype), ScatterIn(dtype))
        self._batches: Iterator[Any] = self._work.batches(dist.get_rank(), WORLD, seed)

    @property
    def numel(self) -> int:
        return sum(each.numel() for each in self.model.parameters())

    def step(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        self._work.loss(self.model, next(self._batches)).backward()
        self.optimizer.step()

    def held_out(self) -> float:
        """The loss on held-out text, with weights as they are saved."""
        if self.wire is not None:
            self.wire.detach()
        else:
            for each in self.model.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()
            carry(self.model, GatherIn(torch.float32), ScatterIn(torch.float32))
        return float(self._work.evaluate(self.model)["test_loss"])

    def check(self) -> None:
        """Raise unless all ranks compute with the same weights."""
        local = [each.to_local() if isinstance(each, DTensor) else each for each in self.model.parameters()]
        if not all(bool(each.isfinite().all()) for each in local):
            raise AssertionError("weights are not finite")


def time_steps(options: argparse.Namespace) -> None:
    """One rank: time all settings, and write what came of them on rank 0."""
    settings = {name: Setting(name, 0) for name in STEPS}
    rows = timed_in_turns(settings, options.rounds, options.steps, warm_up=WARM_UP)
    if dist.get_rank() == 0:
        ring = 3 * (WORLD - 1) / WORLD * 4 * settings[STOCK].numel
        Path(options.out).write_text(json.dumps({"rows": rows, "ring": ring}), encoding="utf-8")


def train(options: argparse.Namespace) -> None:
    """One rank: train all settings with all seeds, and write losses on held-out text on rank 0."""
    found: dict[str, list[float]] = {name: [] for name in LOSSES}
    for seed in range(options.seeds):
        for name in LOSSES:
            setting = Setting(name, seed)
            for _ in range(options.train):
                setting.step()
            found[name].append(setting.held_out())
            if dist.get_rank() == 0:
                print(f"{name}, seed {seed}: {found[name][-1]:.4f}", flush=True)
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps({"losses": found}), encoding="utf-8")


def show_steps(told: dict[str, Any], unslowed: dict[str, Any] | None, rate: str) -> None:
    """A line for each setting, then the goals."""
    rows, ring = told["rows"], told["ring"]
    print(f"{'scatter/gather':<18}{'step ms':>9}{'CPU ms':>9}{'kB':>9}{'of rings':>10}  stock over it, 95 %")
    for name, row in rows.items():
        found = paired(rows[STOCK]["step_s"], row["step_s"])
        sent = fmean(row["bytes"])
        print(
            f"{name:<18}{1e3 * median(row['step_s']):>9.1f}{1e3 * fmean(row['cpu_s']):>9.1f}"
            f"{sent / 1e3:>9.1f}{'1/' + format(ring / sent, '.2f'):>10}  "
            f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
        )
    byte_s = 8.0 / emulate.parse_rate(rate)
    for name, (least, _loss) in GOALS.items():
        share = ring / fmean(rows[name]["bytes"])
        print(f"{name}: bytes 1/{share:.2f}, goal 1/{least}: {'met' if share >= least else 'missed'}")
        if unslowed is None:
            continue
        alone_s = median(unslowed["rows"][STOCK]["step_s"])
        slower = median(unslowed["rows"][name]["step_s"]) / alone_s
        verdict = "met" if slower <= 1.1 else "missed"
        print(f"{name}: {slower:.3f} of stock's time over an unslowed link, goal 1.10: {verdict}")
        for peer in (STOCK, "wire in float32", "wire in bf16"):
            theirs, ours = (alone_s + byte_s * fmean(rows[each]["bytes"]) for each in (peer, name))
            ratio = paired(rows[peer]["step_s"], rows[name]["step_s"]).ratio
            reached = ratio / (theirs / ours)
            verdict = "met" if reached >= 0.9 else "missed"
            print(
                f"{name} against {peer}: {ratio:.2f} times, {reached:.2f} of the bound, goal 0.9: {verdict}"
            )


def show_losses(losses: dict[str, list[float]]) -> None:
    """A line for each setting: its loss, and the difference to stock's, seed by seed."""
    print(f"{'scatter/gather':<18}{'loss':>9}  minus stock's, ± standard error")
    for name, found in losses.items():
        gaps = [one - other for one, other in zip(found, losses[STOCK], strict=True)]
        error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        goal = GOALS.get(name)
        most = (
            ""
            if goal is None
            else f", goal {goal[1]}: " + ("met" if fmean(gaps) <= goal[1] + 2 * error else "missed")
        )
        print(f"{name:<18}{fmean(found):>9.4f}  {fmean(gaps):+.4f} ± {error:.4f}{most}")


def main() -> None:
    """Start ranks on the network, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=("steps", "loss"), default="steps")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--delay", default="0")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", type=int, default=600, help="steps of a training")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        torch.set_num_threads(1)
        dist.init_process_group(emulate.backend())
        time_steps(options) if options.what == "steps" else train(options)
        dist.barrier()
        os._exit(0)
    if options.what == "loss":
        told = told_by_ranks(WORLD, "none")
        show_losses(told["losses"])
    else:
        unslowed = told_by_ranks(WORLD, "none")
        told = told_by_ranks(WORLD, options.rate, options.delay)
        show_steps(told, unslowed, options.rate)
        told = {"slowed": told, "unslowed": unslowed}
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
