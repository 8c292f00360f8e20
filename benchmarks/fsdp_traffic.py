"""FSDP2's own traffic in few bits: bytes, steps and loss beside stock FSDP2 and beside short wires.

Four ranks train a transformer over characters (2.4 M parameters), each layer sharded by itself. Peers are
stock FSDP2, twice; and wires of a few lines, which gather in a type and scatter by one all-to-all in it, with
sums in float32. One of them lets gathers travel while the backward pass computes, as ours do. Stock FSDP2 and
the other wires wait for each gather.

`--what steps`: ranks on an emulated network, each with a link of its own. Settings run in mixed order, round
by round, in the same processes. A step's time is the slowest rank's, bytes are those that leave a rank by its
interface, the mean of all. Beside them stands what rings would send of float32: 3(W - 1)/W · 4P, less one
gather of what the root holds itself, because it stays gathered after the forward pass. The bound on a ratio
of times is (t + B_peer/b) / (t + B_ours/b), with t the time of stock's step over an unslowed link, and b the
rate. Nothing of that computes while bytes travel, so a wire that overlaps may be better than its bound.

`--what loss`: the loss on held-out text after training, with weights as they are saved, seed by seed, minus
stock's; beside it stock with another order of summation (the float32 wire), and weights gathered in 4 bits,
as one should not do.

Goals. Bytes: int8 both ways at most 1/3.7 of the rings', int4 with int8 at most 1/4.4. Steps at 200 Mbit/s:
at least 0.9 of the bound against each peer that computes in float32; over an unslowed link at most 1.10 of
stock's time. Loss: at most 0.01 (int8 both ways) and 0.02 (int4 with int8), each plus two standard errors.
Settings with bfloat16 policies are rows without a goal.

What has been measured is a line of `--runs`: all settings over one link, or one training. It is not measured
again when the command is given once more, so an interrupted run goes on.

    python benchmarks/fsdp_traffic.py --what steps [--rate 200mbit] [--rounds 7] [--steps 2]
    python benchmarks/fsdp_traffic.py --what loss [--seeds 3] [--train 600] [--batch 2]
    (both: [--runs FILE] [--json PATH] [--only-report])
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
from gradwire.sources.fsdp.coding import RoundedBlocks
from gradwire_lab import emulate
from gradwire_lab.bench.statistics import paired
from gradwire_lab.workloads import catalogue

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
PEERS = (STOCK, "wire in float32", "wire in bf16", "wire in bf16, overlapping")
STEPS = (*PEERS, "stock again", *OURS, "stock, bf16", "int8/int8, bf16", "int4/int8, bf16")
LOSSES = (STOCK, "wire in float32", "int8/int8", "int4/int8")
CONTROLS = ("weights in int4",)


class Arriving(dist.Work):
    """A gather on its way, and what is left to do with it."""

    def __init__(self, work: dist.Work, finish: Callable[[], object]) -> None:
        super().__init__()
        self._work, self._finish = work, finish

    def wait(self, timeout: object = None) -> bool:
        self._work.wait()
        self._finish()
        return True


class GatherIn:
    """Gathers in `dtype`: every rank sends its shard to all. FSDP2 computes meanwhile, if it `overlaps`."""

    def __init__(self, dtype: torch.dtype, *, overlaps: bool = False) -> None:
        self.dtype, self.overlaps = dtype, overlaps

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        mine = input_tensor.to(self.dtype, copy=True)
        all_of = torch.empty(output_tensor.numel(), dtype=self.dtype)
        work = dist.all_gather_single(all_of, mine, group=group, async_op=True)
        assert work is not None
        arriving = Arriving(work, lambda: output_tensor.copy_(all_of))
        if self.overlaps:
            return arriving
        arriving.wait()
        return None


class ScatterIn(GatherIn):
    """Scatters in `dtype`: one all-to-all, and a sum in float32."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        mine = input_tensor.to(self.dtype)
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=group)
        output_tensor.copy_(received.view(group.size(), -1).sum(0, dtype=torch.float32))
        return None


class GatherCodes(GatherIn):
    """Gathers weights themselves in 4 bits."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        coding, parts = RoundedBlocks("int4", 128), (input_tensor.numel(),)
        row = torch.empty(coding.row_bytes(parts, torch.float32), dtype=torch.uint8)
        coding.encode(input_tensor.clone(), row[None], parts, 0)
        rows = torch.empty(group.size(), row.numel(), dtype=torch.uint8)
        dist.all_gather_single(rows.view(-1), row, group=group)
        coding.decode(rows, output_tensor, parts)
        return None


def carry(model: nn.Module, gather: object, scatter: object) -> None:
    """Let two objects carry the traffic of all modules."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_custom_all_gather(gather)  # type: ignore[arg-type]
            each.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
            each.set_force_sum_reduction_for_comms(True)


class Setting:
    """One way to train, on one rank."""

    def __init__(self, name: str, seed: int, batch: int | None = None) -> None:
        self._work = catalogue.workload("chargpt", batch_size=batch)
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
            dtype = torch.float32 if "float32" in plain else torch.bfloat16
            carry(self.model, GatherIn(dtype, overlaps=plain.endswith("overlapping")), ScatterIn(dtype))
        self._batches: Iterator[Any] = self._work.batches(dist.get_rank(), WORLD, seed)

    @property
    def ring_bytes(self) -> float:
        """Bytes that a rank would send by rings in float32: of a layer three times, of the root twice."""
        layers = list(self.model.get_submodule("layers").parameters())
        numel = sum(each.numel() for each in self.model.parameters())
        return (WORLD - 1) / WORLD * 4 * (2 * numel + sum(each.numel() for each in layers))

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
        """Raise unless all weights are finite."""
        local = [each.to_local() if isinstance(each, DTensor) else each for each in self.model.parameters()]
        if not all(bool(each.isfinite().all()) for each in local):
            raise AssertionError("weights are not finite")


def time_steps(options: argparse.Namespace) -> None:
    """One rank: time all settings, and write what came of them on rank 0."""
    settings = {name: Setting(name, 0, options.batch) for name in STEPS}
    rows = timed_in_turns(settings, options.rounds, options.steps, warm_up=WARM_UP)
    if dist.get_rank() == 0:
        Path(options.out).write_text(
            json.dumps({"rows": rows, "ring": settings[STOCK].ring_bytes}), encoding="utf-8"
        )


def train(options: argparse.Namespace) -> None:
    """One rank: train what is missing; the loss on held-out text is a line of `--runs`.

    Seed by seed, and in the end what one should not do.
    """
    known = known_losses(options)
    dist.barrier()  # all have read the file
    turns = [(name, seed) for names in (LOSSES, CONTROLS) for seed in range(options.seeds) for name in names]
    for name, seed in turns:
        if (name, seed) in known:
            continue
        setting, start_s = Setting(name, seed, options.batch), time.perf_counter()
        for _ in range(options.train):
            setting.step()
        spent_s = time.perf_counter() - start_s
        setting.check()
        loss = setting.held_out()
        if dist.get_rank() == 0:
            record(options, {"setting": name, "seed": seed}, {"loss": loss, "seconds": spent_s})
            print(f"{name}, seed {seed}: {loss:.4f}, {spent_s:.0f} s", flush=True)
    if dist.get_rank() == 0:
        Path(options.out).write_text("{}", encoding="utf-8")


def key_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options by which a measurement is the same one."""
    if options.what == "loss":
        return {"what": "loss", "train": options.train, "batch": options.batch}
    return {
        "what": "steps",
        "delay": options.delay,
        "rounds": options.rounds,
        "steps": options.steps,
        "batch": options.batch,
    }


def record(options: argparse.Namespace, which: dict[str, Any], found: dict[str, Any]) -> None:
    """Add a line to `--runs`."""
    with options.runs.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**key_of(options), **which, **found}) + "\n")


def recorded(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of `--runs` that were measured with these options."""
    if not options.runs.exists():
        return []
    lines = [json.loads(line) for line in options.runs.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if key_of(options).items() <= line.items()]


def known_losses(options: argparse.Namespace) -> dict[tuple[str, int], float]:
    """By setting and seed, for the seeds that are asked for."""
    lines = recorded(options)
    return {(each["setting"], each["seed"]): each["loss"] for each in lines if each["seed"] < options.seeds}


def known_steps(options: argparse.Namespace, rate: str) -> dict[str, Any] | None:
    """What was measured over links of this rate."""
    return next((each for each in recorded(options) if each["rate"] == rate), None)


def show_steps(told: dict[str, Any]) -> None:
    """A line for each setting."""
    rows, ring = told["rows"], told["ring"]
    print(f"{told['rate']}: {'step ms':>21}{'CPU ms':>9}{'kB':>9}{'of rings':>10}  stock over it, 95 %")
    for name, row in rows.items():
        found = paired(rows[STOCK]["step_s"], row["step_s"])
        sent = fmean(row["bytes"])
        print(
            f"{name:<26}{1e3 * median(row['step_s']):>9.1f}{1e3 * fmean(row['cpu_s']):>9.1f}"
            f"{sent / 1e3:>9.1f}{'1/' + format(ring / sent, '.2f'):>10}  "
            f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
        )


def show_goals(slowed: dict[str, Any], unslowed: dict[str, Any]) -> None:
    """Bytes and times beside what was to be reached."""
    rows, ring, free = slowed["rows"], slowed["ring"], unslowed["rows"]
    byte_s, alone_s = 8.0 / emulate.parse_rate(slowed["rate"]), median(free[STOCK]["step_s"])
    for name, (least, _loss) in GOALS.items():
        share = ring / fmean(rows[name]["bytes"])
        print(f"{name}: bytes 1/{share:.2f}, goal 1/{least}: {'met' if share >= least else 'missed'}")
        found = paired(free[name]["step_s"], free[STOCK]["step_s"])
        print(
            f"{name}, unslowed: {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}) of stock's time, "
            f"goal 1.10: {'met' if found.ratio <= 1.1 else 'missed'}"
        )
        for peer in PEERS:
            theirs, ours = (alone_s + byte_s * fmean(rows[each]["bytes"]) for each in (peer, name))
            found, bound = paired(rows[peer]["step_s"], rows[name]["step_s"]), theirs / ours
            print(
                f"{name} against {peer}: {found.ratio:.2f} times ({found.low:.2f} to {found.high:.2f}), "
                f"{found.ratio / bound:.2f} of the bound {bound:.2f}, goal 0.9: "
                f"{'met' if found.ratio >= 0.9 * bound else 'missed'}"
            )


def show_losses(losses: dict[tuple[str, int], float]) -> None:
    """A line for each setting: its loss, and the difference to stock's, seed by seed."""
    print(f"{'scatter/gather':<18}{'seeds':>6}{'loss':>9}  minus stock's, ± standard error")
    for name in (*LOSSES, *CONTROLS):
        seeds = sorted(seed for setting, seed in losses if setting == name and (STOCK, seed) in losses)
        if not seeds:
            continue
        gaps = [losses[name, seed] - losses[STOCK, seed] for seed in seeds]
        error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        most = ""
        if name in GOALS:
            goal = GOALS[name][1]
            most = f", goal {goal}: " + ("met" if fmean(gaps) <= goal + 2 * error else "missed")
        mean = fmean(losses[name, seed] for seed in seeds)
        print(f"{name:<18}{len(seeds):>6}{mean:>9.4f}  {fmean(gaps):+.4f} ± {error:.4f}{most}")


def main() -> None:
    """Start ranks on the network for what is missing, then print the table."""
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
    parser.add_argument("--batch", type=int, help="windows of 64 characters per rank and step; default: 6")
    parser.add_argument("--runs", type=Path, default=Path("fsdp_traffic.jsonl"), help="what was measured")
    parser.add_argument("--only-report", action="store_true", help="measure nothing")
    parser.add_argument("--json", type=Path, help="write what was measured with these options to this file")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        torch.set_num_threads(1)
        dist.init_process_group(emulate.backend())
        time_steps(options) if options.what == "steps" else train(options)
        dist.barrier()
        os._exit(0)
    if options.what == "loss":
        if not options.only_report:
            told_by_ranks(WORLD, "none")
        show_losses(known_losses(options))
    else:
        for rate in dict.fromkeys(("none", options.rate)):
            delay = "0" if rate == "none" else options.delay
            if known_steps(options, rate) is None and not options.only_report:
                record(options, {"rate": rate}, told_by_ranks(WORLD, rate, delay))
            if told := known_steps(options, rate):
                show_steps(told)
        slowed, unslowed = known_steps(options, options.rate), known_steps(options, "none")
        if slowed and unslowed and options.rate != "none":
            show_goals(slowed, unslowed)
    if options.json is not None:
        options.json.write_text(json.dumps(recorded(options), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
