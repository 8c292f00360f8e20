"""Local steps or compressed steps: what do rounds of local steps cost in bytes, loss and time, beside DDP?

A transformer over characters and an image model, on two and four replicas of one rank each. Settings: no
communication, DDP, a recipe in every step, DiLoCo in float32 as 60 lines of plain torch (`Diloco`), and
`gradwire.outer` with DiLoCo's optimizer, few bits, SparseLoCo, and a delayed landing.

Two phases, because a loss does not depend on the link, and a time not on the seed:

- losses, on an unshaped link: every setting from equal weights on equal batches, over several seeds. Bytes
  are those at the rank's interface. Gaps are to the plain DiLoCo of the same seed, at equal tokens.
- times, on emulated links between sites: seconds of whole rounds, or of a few steps where each has an
  exchange. "exposed" is the share of a step's time that is not computation. "to DiLoCo's loss" is the time
  until the mean training loss, over as many steps as a round has, falls to that with which the plain DiLoCo
  ends. In brackets is the share of DiLoCo's time that its rounds expose: no faster round could win more.

Every finished run is a line of `--runs`, and is not repeated when the command is given again.

    python benchmarks/outer.py [--workloads chargpt resnet_demo] [--replicas 2 4] [--seeds 3] [--steps 600]
        [--every 30] [--delay 5] [--rates 20mbit 100mbit] [--latency 50ms] [--runs FILE]
    python benchmarks/outer.py --only ddp diloco --steps 60 --seeds 1        # does it run?
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.lab import emulate
from gradwire.lab.workloads.catalogue import workload

ALONE, PLAIN = "alone", "diloco"
EVERY_STEP = "int4"
UNSHAPED = "unlimited"
SETTINGS = (
    ALONE,
    "ddp",
    "every step",
    PLAIN,
    "outer diloco",
    "outer int4",
    "outer sparseloco",
    "outer diloco delayed",
    "outer sparseloco delayed",
)
DENSE_STEPS = 3
"""Steps that are timed where each has an exchange: whole rounds of them would take hours."""


class Diloco:
    """DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1) in float32, over gloo.

    After `every` steps, replicas average Δ = θ₀ − θ. SGD at a rate of 0.7 with Nesterov momentum 0.9 takes it
    for the gradient of θ₀, and all go on from there. Statistics of BatchNorm are averaged.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self._every, self._steps = every, 0
        self._own = list(model.parameters())
        self._buffers = [each for each in model.buffers() if each.is_floating_point()]
        self._shared = [nn.Parameter(each.detach().clone()) for each in self._own]
        self._outer = torch.optim.SGD(self._shared, lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def step(self) -> None:
        """Call it after each step of the inner optimizer."""
        self._steps += 1
        if self._steps % self._every:
            return
        changes = [shared - own for shared, own in zip(self._shared, self._own, strict=True)]
        both = [*changes, *self._buffers]
        flat = torch.cat([each.reshape(-1) for each in both])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        means = flat.split([each.numel() for each in both])
        for shared, mean in zip(self._shared, means, strict=False):
            shared.grad = mean.view_as(shared)
        self._outer.step()
        for own, shared in zip(self._own, self._shared, strict=True):
            own.copy_(shared)
        for buffer, mean in zip(self._buffers, means[len(changes) :], strict=True):
            buffer.copy_(mean.view_as(buffer))


@dataclass(frozen=True)
class Key:
    """One run. `link` is the rate, or `UNSHAPED` for a run that is about losses."""

    workload: str
    replicas: int
    link: str
    setting: str
    seed: int
    steps: int
    every: int
    delay: int


class Training:
    """One setting on this rank."""

    def __init__(self, key: Key) -> None:
        self.work = workload(key.workload)
        self.model = self.work.model(key.seed)
        self._module, self._diloco = self.model, None
        self.wire: Any = None
        optimizer = self.work.optimizer(self.model.parameters())
        if key.setting in ("ddp", "every step"):
            self._module = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if key.setting == "every step":
            self.wire = gradwire.attach(self._module, optimizer, EVERY_STEP)
        elif key.setting == PLAIN:
            self._diloco = Diloco(self.model, key.every)
        elif key.setting.startswith("outer"):
            self.wire = gradwire.outer(
                self.model,
                optimizer,
                key.setting.split()[1],
                every=key.every,
                replicas=dist.group.WORLD,
                delay=delay_of(key),
            )
        self._optimizer = optimizer
        self._batches = self.work.batches(dist.get_rank(), key.replicas, key.seed)

    def step(self) -> torch.Tensor:
        """The loss of one step."""
        self._optimizer.zero_grad()
        loss = self.work.loss(self._module, next(self._batches))
        loss.backward()
        self._optimizer.step()
        if self._diloco is not None:
            self._diloco.step()
        return loss.detach()

    def evaluate(self) -> dict[str, float]:
        """On held-out data, with the parameters that replicas share; they are the same on all."""
        shared = self.wire.shared_parameters() if hasattr(self.wire, "shared_parameters") else nullcontext()
        with shared, torch.no_grad():
            words = torch.cat([each.reshape(-1) for each in self.model.parameters()]).view(torch.int32).long()
            ends = torch.stack([words.sum(), -words.sum()])
            dist.all_reduce(ends, dist.ReduceOp.MAX)
            if ends[0] != -ends[1]:
                raise AssertionError("replicas differ")
            return self.work.evaluate(self.model)


def delay_of(key: Key) -> int:
    """Steps after which a round lands."""
    return key.delay if key.setting.endswith("delayed") else 0


def losses_of(key: Key) -> dict[str, Any]:
    """Train. The mean loss of each step over ranks, what was sent, and figures on held-out data."""
    training, found = Training(key), torch.empty(key.steps)
    before = emulate.counters()
    for step in range(key.steps):
        found[step] = training.step()
    for _ in range(delay_of(key)):  # the last round lands; what is learned meanwhile is in no round
        training.step()
    sent = emulate.counters()
    dist.all_reduce(found)
    means = [float(each) / key.replicas for each in found]
    bytes_sent = None if sent is None or before is None else (sent - before).tx_bytes
    return {"losses": means, "sent_bytes": bytes_sent, **training.evaluate()}


def times_of(key: Key, rounds: int) -> dict[str, Any]:
    """Seconds a step, of each round."""
    training = Training(key)
    each_step = key.setting in ("ddp", "every step")
    steps = DENSE_STEPS if each_step else key.every
    for _ in range(steps):
        training.step()
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(steps):
            training.step()
        spent = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        seconds.append(float(spent) / steps)
    return {"step_s": seconds}


def worker(options: argparse.Namespace) -> None:
    """One rank: all runs of one network that are not in the file yet."""
    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    known = finished(options.runs)
    dist.barrier()  # all have read before the first writes
    for key in keys(options, int(os.environ["WORLD_SIZE"]), options.link):
        if key in known:
            continue
        shaped = key.link != UNSHAPED
        found = times_of(key, options.rounds) if shaped else losses_of(key)
        if dist.get_rank() == 0:
            with options.runs.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**asdict(key), **found}) + "\n")
        dist.barrier()
    os._exit(0)


def keys(options: argparse.Namespace, replicas: int, link: str) -> list[Key]:
    """The runs on one network, in order."""
    seeds = range(options.seeds) if link == UNSHAPED else range(1)
    left_out = {ALONE} if link == UNSHAPED else set()
    return [
        Key(name, replicas, link, setting, seed, options.steps, options.every, options.delay)
        for name in options.workloads
        for seed in seeds
        for setting in options.only
        if setting not in left_out
    ]


def finished(path: Path) -> dict[Key, dict[str, Any]]:
    """What the file holds."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = Key.__dataclass_fields__
    return {Key(**{name: row[name] for name in names}): row for row in rows}


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean and standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):+.{digits}f}{error}"


def reached(losses: Sequence[float], target: float, window: int) -> int | None:
    """After how many steps the mean of the last `window` losses is `target` or less.

    >>> reached([4.0, 3.0, 2.0, 1.0], 2.5, 2), reached([4.0, 3.0], 2.5, 2)
    (3, None)
    """
    means = (fmean(losses[stop - window : stop]) for stop in range(window, len(losses) + 1))
    return next((stop for stop, mean in enumerate(means, window) if mean <= target), None)


def loss_table(rows: dict[Key, dict[str, Any]], options: argparse.Namespace) -> list[str]:
    """Bytes and losses, by model, replicas and setting."""
    lines = [
        "| model | replicas | setting | MB sent per rank | of DiLoCo's | test loss | gap to DiLoCo's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in options.workloads:
        for replicas in options.replicas:
            runs = {
                setting: [rows[key] for key in keys(options, replicas, UNSHAPED)
                          if (key.workload, key.setting) == (name, setting) and key in rows]
                for setting in options.only
            }  # fmt: skip
            plain = runs.get(PLAIN, [])
            for setting, found in runs.items():
                if not found:
                    continue
                sent, share = "-", "-"
                if found[0]["sent_bytes"] is not None:
                    mean = fmean(each["sent_bytes"] for each in found)
                    sent = f"{mean / 1e6:.2f}"
                    share = f"1/{fmean(each['sent_bytes'] for each in plain) / mean:.1f}" if plain else "-"
                losses = [each["test_loss"] for each in found]
                gaps = [one - other["test_loss"] for one, other in zip(losses, plain, strict=False)]
                apart = spread(gaps) if gaps and setting != PLAIN else "-"
                lines.append(
                    f"| {name} | {replicas} | {setting} | {sent} | {share} | {fmean(losses):.4f} | {apart} |"
                )
    return lines


def time_table(rows: dict[Key, dict[str, Any]], options: argparse.Namespace) -> list[str]:
    """Times, by model, replicas, link and setting."""
    lines = [
        "| model | replicas | link | setting | step, ms | exposed | to DiLoCo's loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in options.workloads:
        for replicas in options.replicas:
            for rate in options.rates:
                runs = {key.setting: rows[key] for key in keys(options, replicas, rate)
                        if key.workload == name and key in rows}  # fmt: skip
                steps = _steps_to_the_loss(rows, options, name, replicas)
                alone = median(runs[ALONE]["step_s"]) if ALONE in runs else None
                step_s = {setting: median(found["step_s"]) for setting, found in runs.items()}
                for setting, each_s in step_s.items():
                    exposed = "-" if alone is None else f"{max(0.0, 1.0 - alone / each_s):.1%}"
                    until = f"{steps[setting] * each_s:.0f} s" if steps.get(setting) else "-"
                    bound = f" ({exposed})" if setting == PLAIN else ""
                    lines.append(
                        f"| {name} | {replicas} | {rate}, {options.latency} | {setting} | {each_s * 1e3:.0f} "
                        f"| {exposed} | {until}{bound} |"
                    )
    return lines


def _steps_to_the_loss(
    rows: dict[Key, dict[str, Any]], options: argparse.Namespace, name: str, replicas: int
) -> dict[str, float]:
    """Mean steps until the loss with which plain DiLoCo of the same seed ends; none if not all get there."""
    found: dict[str, list[int | None]] = {}
    of_network = keys(options, replicas, UNSHAPED)
    plain = {key.seed: rows[key]["losses"] for key in of_network
             if (key.workload, key.setting) == (name, PLAIN) and key in rows}  # fmt: skip
    for key in of_network:
        if key.workload == name and key in rows and key.seed in plain:
            target = fmean(plain[key.seed][-options.every :])
            found.setdefault(key.setting, []).append(reached(rows[key]["losses"], target, options.every))
    return {
        setting: fmean(each for each in steps if each is not None)
        for setting, steps in found.items()
        if None not in steps
    }


def main() -> None:
    """Run what is missing on each network, then print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=["chargpt", "resnet_demo"])
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="a multiple of --every")
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--delay", type=int, default=5)
    parser.add_argument("--rates", nargs="+", default=["20mbit", "100mbit"])
    parser.add_argument("--latency", default="50ms", help="one way")
    parser.add_argument("--rounds", type=int, default=3, help="that are timed")
    parser.add_argument("--runs", type=Path, default=Path("outer.jsonl"))
    parser.add_argument("--link", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps % options.every:
        parser.error(f"--steps {options.steps} is not a multiple of --every {options.every}")
    if options.link is not None:
        worker(options)
        return
    mode = emulate.enter()
    for replicas in options.replicas:
        for rate in (UNSHAPED, *options.rates):
            if finished(options.runs).keys() >= set(keys(options, replicas, rate)):
                continue
            delay_s = 0.0 if rate == UNSHAPED else emulate.parse_delay(options.latency)
            link = emulate.EmulatedLink(emulate.parse_rate(rate), delay_s)
            command = [sys.executable, *sys.argv, "--link", rate]
            with emulate.EmulatedNetwork(replicas, link, mode) as network:
                ranks = [network.popen(rank, command) for rank in range(replicas)]
                if any(rank.wait() for rank in ranks):
                    raise SystemExit(f"a rank failed on {rate}")
    rows = finished(options.runs)
    print("\n".join([*loss_table(rows, options), "", *time_table(rows, options)]))


if __name__ == "__main__":
    main()
