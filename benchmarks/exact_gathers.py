"""What do FSDP2's exact gathers send, and what does a step take, beside stock FSDP2 and rounded gathers?

Ranks train a transformer over characters (2.4 M parameters) in bfloat16, with masters in float32 and AdamW at
the lab's rate. Each layer is sharded by itself. A step has `--micro` batches, of which the last one scatters.

`--what steps`: settings take turns, in another order each round, on an emulated network with a link for each
rank; "two nodes" means two ranks a node, which share its link. A step's time is the slowest rank's, bytes are
those that leave a rank by its interface.

- stock: FSDP2 as it is, twice; their ratio is the spread of a setting against itself
- gathered once: stock FSDP2 that keeps parameters gathered until the optimizer has stepped, and the same with
  scatters in `int4`
- `int4+int8`, `int4+exact`, `dense+exact`: the recipe of scatters, and gathers

`--what run`: one setting after the other trains `--steps` steps with a warm-up and a cosine, or at a constant
rate. Reported are bytes of gathers by quarter of the run, as modules count them, beside stock's gathers, the
floor (the entropy of what each optimizer step has changed, given exponents) and 32 bytes for each gather; of
what they consist; what the layout for devices would have sent; bytes of all traffic at the interface beside
what is counted; and whether losses and masters have the bits of stock FSDP2.

    python benchmarks/exact_gathers.py --what steps [--rate 200mbit] [--rounds 9] [--steps 2] [--nodes 2]
    python benchmarks/exact_gathers.py --what run [--world 4] [--steps 200] [--rate-is constant]
    (both: [--micro 2] [--json PATH])
"""

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from exact_steps import floor_bits
from ranks import timed_in_turns, told_by_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire.codec.exact_steps import CHECKSUM_BYTES, HEADER_BYTES, StepsKey, encode_steps
from gradwire.sources.fsdp.modules import modules_of
from gradwire_lab import emulate
from gradwire_lab.bench.statistics import paired
from gradwire_lab.workloads import catalogue

STOCK, ONCE, ONCE_INT4 = "stock", "gathered once", "int4, gathered once"
OURS: dict[str, tuple[str, Literal["int8", "exact"] | None]] = {
    ONCE_INT4: ("int4", None),
    "int4+int8": ("int4", "int8"),
    "int4+exact": ("int4", "exact"),
    "dense+exact": ("dense", "exact"),
}
STEPS = (STOCK, "stock again", ONCE, *OURS)
OF_RUNS = {"the CPU's codec": 1 / 5, "the layout for devices": 1 / 3}
"""Of stock's gathers, those of a whole run should take at most this share."""
GOALS = {"int4+int8": 0.8, STOCK: 0.3, ONCE: 0.8, ONCE_INT4: 0.8}
"""Of the step of each, that of `int4+exact` should take at most this share."""
WARM_UP = 4
FRAME_BYTES = HEADER_BYTES + CHECKSUM_BYTES


class Setting:
    """One way to train, on one rank."""

    def __init__(self, name: str, micro: int, shares: Sequence[float] | None = None) -> None:
        """With `shares` of the lab's rate, one for each step, what optimizer steps change is counted."""
        self._work, self._micro = catalogue.workload("chargpt"), micro
        world = dist.get_world_size()
        mesh, policy = init_device_mesh("cpu", (world,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = self._work.model(0)
        how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        self._keeps = name in (ONCE, ONCE_INT4)
        if self._keeps:
            how["reshard_after_forward"] = False
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, **how)
        self.model: FSDPModule = fully_shard(model, **how)
        assert isinstance(self.model, nn.Module)
        self.optimizer = self._work.optimizer(self.model.parameters())
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._done, self._shares = 0, shares
        self.wire: Any = None
        self.floor_bytes, self.frame_bytes, self.frames, self.device_bytes = 0.0, 0.0, 0, 0.0
        """Entropy of what optimizer steps have changed in this rank's shards, given exponents; of the frames
        that code it bytes and number; and bytes of those that a device would decode."""
        if name in OURS:
            scatter, gather = OURS[name]
            self.wire = gradwire.attach(self.model, self.optimizer, scatter, gather=gather)
        self._batches: Iterator[Any] = self._work.batches(dist.get_rank(), world, 0)

    def step(self) -> float:
        """Forward and backward of each micro-batch, update. Returns the last loss."""
        if self._shares is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self._shares[self._done]
        self._done += 1
        self.optimizer.zero_grad()
        for number in range(self._micro):
            is_last = number == self._micro - 1
            self.model.set_requires_gradient_sync(is_last)
            if self._keeps:
                self.model.set_reshard_after_backward(is_last)
            loss = self._work.loss(self.model, next(self._batches))  # type: ignore[arg-type]
            loss.backward()
        before = self._bits() if self._shares is not None and self.wire is not None else []
        self.optimizer.step()
        for old, new in zip(before, self._bits() if before else [], strict=True):
            if (old == new).all():
                continue
            halves = [torch.from_numpy(each.view(np.int16)).view(torch.bfloat16) for each in (new, old)]
            self.floor_bytes += floor_bits(old, new) / 8
            self.frame_bytes += encode_steps(*halves, StepsKey(0, 1, 0)).numel()
            self.device_bytes += encode_steps(*halves, StepsKey(0, 1, 0), "widths").numel()
            self.frames += 1
        return float(loss.detach())

    def _bits(self) -> list[Any]:
        """The bits of this rank's shard of each module, in bfloat16."""
        found = []
        for module in modules_of(self.model):  # type: ignore[arg-type]
            shards = [each.to_local().detach().reshape(-1) for each in module.parameters.values()]  # type: ignore[attr-defined]
            found.append(torch.cat(shards).bfloat16().view(torch.int16).numpy().view(np.uint16).copy())
        return found

    def stock_gathers(self) -> float:
        """Bytes of gathers of a step that a rank of stock FSDP2 sends: in forward and backward, but for the
        root, which stays gathered in between.
        """
        elements = sum((2 if each.name else 1) * sum(each.elements) for each in modules_of(self.model))  # type: ignore[arg-type]
        return float(self._micro * (dist.get_world_size() - 1) * 2 * elements)

    def masters(self) -> torch.Tensor:
        """The masters of all ranks, in a row. A collective."""
        assert isinstance(self.model, nn.Module)
        for each in self.model.modules():
            if isinstance(each, FSDPModule):
                each.reshard()
        every = (
            each.full_tensor() if isinstance(each, DTensor) else each for each in self.model.parameters()
        )
        return torch.cat([each.detach().reshape(-1) for each in every])

    def check(self) -> None:
        """Raise unless all masters are finite. A collective."""
        if not bool(self.masters().isfinite().all()):
            raise AssertionError("masters are not finite")


def cosine(steps: int) -> list[float]:
    """Shares of the rate: a tenth of the steps up, then a cosine down to a tenth."""
    up = max(1, steps // 10)
    down = [0.55 + 0.45 * math.cos(math.pi * step / max(1, steps - up)) for step in range(steps - up)]
    return [(step + 1) / up for step in range(up)] + down


def time_steps(options: argparse.Namespace) -> dict[str, Any]:
    """On one rank: time all settings."""
    settings = {name: Setting(name, options.micro) for name in STEPS}
    rows = timed_in_turns(settings, options.rounds, options.steps, warm_up=WARM_UP)
    reports = {
        name: {
            "coding_s": report.compress_s,
            "counted": report.wire_bytes_per_step,
            "held": report.held_bytes,
        }
        for name, setting in settings.items()
        if setting.wire is not None
        for report in [setting.wire.report()]
    }
    return {"rows": rows, "reports": reports}


def train(options: argparse.Namespace) -> dict[str, Any]:
    """On one rank: train each setting, one after the other."""
    found: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    shares = cosine(options.steps) if options.rate_is == "cosine" else [1.0] * options.steps
    for name in (STOCK, "dense+exact"):
        setting = Setting(name, options.micro, shares)
        steps, losses = [], []
        dist.barrier()
        start = emulate.counters()
        for _ in range(options.steps):
            before = told_so_far(setting)
            losses.append(setting.step())
            after = told_so_far(setting)
            steps.append([b - a for a, b in zip(before, after, strict=True)])
        dist.barrier()
        end = emulate.counters()
        assert start is not None
        assert end is not None
        kept[name] = losses, setting.masters()
        numel = kept[name][1].numel()
        found[name] = {"interface": float((end - start).tx_bytes), "numel": numel, "steps": steps}
        if setting.wire is not None:
            found[name]["counted"] = setting.wire.report().wire_bytes
            found[name]["stock_gathers"] = setting.stock_gathers()
            found[name]["bits"] = kept[name][0] == kept[STOCK][0] and torch.equal(
                kept[name][1].view(torch.int32), kept[STOCK][1].view(torch.int32)
            )
    return found


def told_so_far(setting: Setting) -> list[float]:
    """Bytes of this rank's gathers so far, how many there were, and of changes the floor, frames' bytes,
    frames, and bytes of frames for devices.
    """
    gathers = [] if setting.wire is None else setting.wire._traffic.gathers
    return [
        float(sum(each.account.sent_bytes for each in gathers)),
        float(sum(each.account.calls.total() for each in gathers)),
        setting.floor_bytes,
        setting.frame_bytes,
        float(setting.frames),
        setting.device_bytes,
    ]


def of_all_ranks(mine: Any) -> list[Any]:
    """What each rank has found, on all."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def show_steps(told: dict[str, Any]) -> None:
    """A line for each setting, and the goals."""
    rows = told["rows"]
    print(f"{'':<16}{'step ms':>9}{'CPU ms':>9}{'kB':>9}  step over stock's, 95 %")
    for name, row in rows.items():
        found = paired(row["step_s"], rows[STOCK]["step_s"])
        print(
            f"{name:<16}{1e3 * median(row['step_s']):>9.1f}{1e3 * fmean(row['cpu_s']):>9.1f}"
            f"{fmean(row['bytes']) / 1e3:>9.1f}  {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
        )
    for name, most in GOALS.items():
        found = paired(rows["int4+exact"]["step_s"], rows[name]["step_s"])
        print(
            f"int4+exact over {name}: {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}), goal {most}: "
            f"{'met' if found.ratio <= most else 'missed'}"
        )
    for name, report in told["reports"].items():
        print(
            f"{name}: coding {1e3 * report['coding_s']:.1f} ms a step, counted "
            f"{report['counted'] / 1e3:.1f} kB, held {report['held'] / 1e6:.1f} MB"
        )


def show_run(told: list[dict[str, Any]], world: int, micro: int, steps: int) -> None:
    """Bytes and bits of a run."""
    own = [each["dense+exact"] for each in told]
    stock = fmean(each[STOCK]["interface"] for each in told)
    interface, counted = (fmean(each[key] for each in own) for key in ("interface", "counted"))
    numel, others = own[0]["numel"], world - 1
    print(f"bits of losses and masters are stock's: {all(each['bits'] for each in own)}")
    print(f"interface: {interface / 1e6:.2f} MB a rank, {interface / counted:.3f} of what is counted")
    print(f"stock at the interface: {stock / 1e6:.2f} MB")
    # The change that an optimizer step makes is sent in the step after it.
    ranks = zip(*(each["steps"] for each in own), strict=True)
    rows = [[fmean(each) for each in zip(*step, strict=True)] for step in ranks]
    later = [(*sent[:2], *changed[2:]) for sent, changed in zip(rows[1:], rows, strict=False)]
    once = 2 * others / world * numel  # a gather in 16 bits
    raw = own[0]["stock_gathers"]
    for number in range(4):
        part = later[len(later) * number // 4 : len(later) * (number + 1) // 4]
        if not part:
            continue
        sent, calls, floor, frames, count, device = (fmean(each) for each in zip(*part, strict=True))
        least = floor * others + 32 * calls * others
        print(
            f"quarter {number + 1}: gathers {sent / 1e3:.1f} kB a step, {16 * sent / once:.2f} bits a "
            f"parameter, {sent / least:.2f} of floor and heads, {sent / raw:.4f} of stock's"
        )
        heads, waited = FRAME_BYTES * count, 32 * calls
        parts = {
            "floor": floor,
            "codes above it": frames - heads - floor,
            "frames' heads": heads,
            "32 bytes a gather": waited,
            "room and filling": sent / others - frames - waited,
        }
        said = ", ".join(f"{name} {bytes_ * others / sent:.1%}" for name, bytes_ in parts.items())
        print(f"  of which {said}; frames for devices are {device / frames:.2f} of the CPU's")
    total = sum(sent for sent, *_ in rows)
    # As if the room behind heads were as large a share.
    frames, device = (sum(each[place] for each in rows) for place in (3, 5))
    for name, sent in {"the CPU's codec": total, "the layout for devices": total * device / frames}.items():
        share, most = sent / raw / len(rows), OF_RUNS[name]
        print(
            f"whole run, {name}, the first gather among it: {sent / 1e6:.2f} MB of "
            f"{raw * len(rows) / 1e6:.1f}, {share:.4f} of stock's gathers, goal {most:.2f}: "
            f"{'met' if share <= most else 'missed'}"
        )
    print(f"{steps} steps of {micro} micro-batches on {world} ranks")


def main() -> None:
    """Start ranks on the network, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=("steps", "run"), default="steps")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--nodes", type=int, help="nodes that share the ranks between them")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rate-is", choices=("cosine", "constant"), default="cosine")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        torch.set_num_threads(1)
        dist.init_process_group(emulate.backend())
        told = time_steps(options) if options.what == "steps" else of_all_ranks(train(options))
        if dist.get_rank() == 0:
            Path(options.out).write_text(json.dumps(told), encoding="utf-8")
        dist.barrier()
        os._exit(0)
    told = told_by_ranks(options.world, options.rate, nodes=options.nodes)
    if options.what == "steps":
        show_steps(told)
    else:
        show_run(told, options.world, options.micro, options.steps)
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
