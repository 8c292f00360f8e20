"""Local steps or compressed steps: what do rounds of local steps cost in bytes, loss and time, beside DDP?

A transformer over characters and an image model, on two and four replicas of one rank each. Settings: DDP, a
recipe in every step, DiLoCo in float32 as 60 lines of plain torch (`Diloco`), and `gradwire.outer` with
DiLoCo's optimizer, few bits, SparseLoCo, and a delayed landing.

Two kinds of runs, because a loss does not depend on the link, and a time not on the seed:

- losses, on an unshaped link: every setting from equal weights on equal batches, over several seeds. Bytes
  are counted at the ranks' interfaces. Gaps are to the plain DiLoCo of the same seed, at equal tokens.
- times, on emulated links between sites: seconds of whole rounds that follow each other, or of a few steps
  where each has an exchange; before and after, seconds of the same steps without any. "exposed" is the share
  of time that is not theirs. "to DiLoCo's loss" is the time until the held-out loss, looked at after every
  round, is that with which the plain DiLoCo ends. In brackets is the share of DiLoCo's time that its rounds
  expose: no faster round could win more.

Every finished run is a line of `--runs`, and is not repeated when the command is given again. With
`--minutes` no run begins later than that. The tables show all that the file holds of what was asked for.

    python benchmarks/outer.py [--workloads chargpt resnet_demo] [--replicas 2 4] [--seeds 0 1 2]
        [--only ddp diloco …] [--rates unlimited 20mbit 100mbit] [--latency 50ms] [--steps 600] [--every 30]
        [--delay 5] [--rounds 3] [--minutes 9] [--runs FILE]
    python benchmarks/outer.py --only ddp diloco --steps 60 --seeds 0 --rates unlimited   # does it run?
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab import emulate
from gradwire_lab.workloads.catalogue import workload

PLAIN = "diloco"
EACH_STEP = {"each step int4": "int4", "each step topk": "topk(ratio=0.01)"}
SETTINGS = (
    "ddp",
    *EACH_STEP,
    PLAIN,
    "outer diloco",
    "outer int4",
    "outer sparseloco",
    "outer diloco delayed",
    "outer sparseloco delayed",
)
ALONE = "alone"
"""Not a setting of its own: steps without communication, beside which each is timed."""
UNSHAPED = "unlimited"
DENSE_STEPS = 3
"""Steps that are timed at once where each has an exchange: as many as a round has would take hours."""

Row = dict[str, Any]


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
    """One run. `link` is rate and delay, or `UNSHAPED` for a run that is about losses."""

    workload: str
    replicas: int
    link: str
    setting: str
    seed: int
    steps: int
    """Of a run that is about times, those that are timed."""
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
        if is_each_step(key):
            self._module = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if key.setting in EACH_STEP:
            self.wire = gradwire.attach(self._module, optimizer, EACH_STEP[key.setting])
        elif key.setting == PLAIN:
            self._diloco = Diloco(self.model, key.every)
        elif key.setting.startswith("outer"):
            recipe, replicas = key.setting.split()[1], dist.group.WORLD
            self.wire = gradwire.outer(
                self.model, optimizer, recipe, every=key.every, replicas=replicas, delay=key.delay
            )
        self._optimizer = optimizer
        self._batches = self.work.batches(dist.get_rank(), key.replicas, key.seed)

    def step(self) -> None:
        """One local step, and the round or the exchange if it has one."""
        self._optimizer.zero_grad()
        self.work.loss(self._module, next(self._batches)).backward()
        self._optimizer.step()
        if self._diloco is not None:
            self._diloco.step()

    def held_out(self) -> dict[str, float]:
        """Figures of the parameters that replicas share, and nothing is sent."""
        with self._shared():
            return self.work.evaluate(self.model)

    def require_alike(self) -> None:
        """Raise unless the parameters that replicas share are the same bits on all."""
        with self._shared(), torch.no_grad():
            words = torch.cat([each.reshape(-1) for each in self.model.parameters()]).view(torch.int32).long()
        ends = torch.stack([words.sum(), -words.sum()])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise AssertionError("replicas differ")

    def _shared(self) -> Any:
        return self.wire.shared_parameters() if hasattr(self.wire, "shared_parameters") else nullcontext()


def is_each_step(key: Key) -> bool:
    """Whether each step has an exchange."""
    return key.setting == "ddp" or key.setting in EACH_STEP


def losses_of(key: Key) -> Row:
    """Train; held-out losses after each round, by step, and bytes sent, a mean over ranks.

    What is learned while the last round of a delayed setting lands is in no round: all have equal tokens.
    """
    training, looks = Training(key), []
    dist.barrier()  # what gave ranks equal parameters has been sent
    before = emulate.counters()
    for step in range(1, key.steps + key.delay + 1):
        training.step()
        if step > key.delay and (step - key.delay) % key.every == 0 and dist.get_rank() == 0:
            looks.append((step, training.held_out()["test_loss"]))
    dist.barrier()
    after = emulate.counters()
    training.require_alike()
    if before is None or after is None:
        return {"looks": looks, "sent_bytes": None}
    sent = torch.tensor((after - before).tx_bytes)
    dist.all_reduce(sent)
    return {"looks": looks, "sent_bytes": int(sent) / key.replicas}


def times_of(key: Key) -> Row:
    """Seconds a step, of each window of steps, a mean over ranks; and without communication.

    Windows follow each other without a barrier, whose own latency would pass for a part of the first. Each
    begins after the landing of a round.
    """
    training, alone = Training(key), Training(replace(key, setting=ALONE))
    window = DENSE_STEPS if is_each_step(key) else key.every
    windowed(alone, DENSE_STEPS, 1)
    alone_s = windowed(alone, key.every, 1)
    windowed(training, window + key.delay, 1)
    step_s = windowed(training, window, key.steps // window)
    alone_s += windowed(alone, key.every, 1)
    both = torch.tensor([*alone_s, *step_s], dtype=torch.float64)
    dist.all_reduce(both)
    means = [float(each) / key.replicas for each in both]
    return {"alone_s": means[: len(alone_s)], "step_s": means[len(alone_s) :]}


def windowed(training: Training, steps: int, windows: int) -> list[float]:
    """Seconds a step of each window."""
    ends_s = [time.perf_counter()]
    for _ in range(windows):
        for _ in range(steps):
            training.step()
        ends_s.append(time.perf_counter())
    return [(end - start) / steps for start, end in pairwise(ends_s)]


def worker(options: argparse.Namespace) -> None:
    """One rank: all runs on one network that are not in the file yet, as far as there is time."""
    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    known = finished(options.runs)
    dist.barrier()  # all have read before the first writes
    for key in keys(options, int(os.environ["WORLD_SIZE"]), options.rate):
        late = torch.tensor(float(time.monotonic() > options.until_s))
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late:
            break
        if key in known:
            continue
        found = losses_of(key) if key.link == UNSHAPED else times_of(key)
        if dist.get_rank() == 0:
            with options.runs.open("ab", buffering=0) as file:  # one write: the whole line or none
                file.write((json.dumps({**asdict(key), **found}) + "\n").encode())
        gc.collect()
        dist.barrier()
    os._exit(0)


def keys(options: argparse.Namespace, replicas: int, rate: str) -> list[Key]:
    """The runs on one network, in order."""
    shaped = rate != UNSHAPED
    link = f"{rate}, {options.latency}" if shaped else UNSHAPED
    found = []
    for name in options.workloads:
        for seed in [0] if shaped else options.seeds:
            for setting in options.only:
                delay = options.delay if setting.endswith("delayed") else 0
                key = Key(name, replicas, link, setting, seed, options.steps, options.every, delay)
                if shaped:
                    window = DENSE_STEPS if is_each_step(key) else options.every
                    key = replace(key, steps=options.rounds * window)
                found.append(key)
    return found


def finished(path: Path) -> dict[Key, Row]:
    """What the file holds."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = Key.__dataclass_fields__
    return {Key(**{name: row[name] for name in names}): row for row in rows}


def by_seed(
    rows: dict[Key, Row], options: argparse.Namespace, name: str, replicas: int
) -> dict[str, dict[int, Row]]:
    """The runs about losses of one model, by setting and then by seed."""
    found: dict[str, dict[int, Row]] = {}
    for key in keys(options, replicas, UNSHAPED):
        if key.workload == name and key in rows:
            found.setdefault(key.setting, {})[key.seed] = rows[key]
    return found


def paired(one: dict[int, Row], other: dict[int, Row]) -> Iterator[tuple[Row, Row]]:
    """Runs of equal seeds."""
    return ((one[seed], other[seed]) for seed in one if seed in other)


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean and standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):+.{digits}f}{error}"


def reached(looks: Sequence[tuple[int, float]], target: float) -> int | None:
    """The step of the first look at which the loss is `target` or less.

    >>> reached([(30, 3.0), (60, 2.0), (90, 1.0)], 2.5), reached([(30, 3.0)], 2.5)
    (60, None)
    """
    return next((step for step, loss in looks if loss <= target), None)


def part(share: float) -> str:
    """A share that may be above 1.

    >>> part(0.01), part(30.0)
    ('1/100.0', '30.0')
    """
    return f"1/{1 / share:.1f}" if share < 1 else f"{share:.1f}"


def loss_table(rows: dict[Key, Row], options: argparse.Namespace) -> list[str]:
    """Bytes and losses, by model, replicas and setting."""
    lines = [
        "| model | replicas | setting | seeds | MB per rank | of DiLoCo's | test loss | gap to DiLoCo's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in options.workloads:
        for replicas in options.replicas:
            runs = by_seed(rows, options, name, replicas)
            plain = runs.get(PLAIN, {})
            for setting, found in runs.items():
                sent = share = gap = "-"
                if all(row["sent_bytes"] is not None for row in found.values()):
                    sent = f"{fmean(row['sent_bytes'] for row in found.values()) / 1e6:.2f}"
                    shares = [row["sent_bytes"] / other["sent_bytes"] for row, other in paired(found, plain)]
                    share = part(fmean(shares)) if shares else "-"
                gaps = [row["looks"][-1][1] - other["looks"][-1][1] for row, other in paired(found, plain)]
                if gaps and setting != PLAIN:
                    gap = spread(gaps)
                loss = fmean(row["looks"][-1][1] for row in found.values())
                seeds = len(found)
                lines.append(
                    f"| {name} | {replicas} | {setting} | {seeds} | {sent} | {share} | {loss:.4f} | {gap} |"
                )
    return lines


def time_table(rows: dict[Key, Row], options: argparse.Namespace) -> list[str]:
    """Times, by model, replicas, link and setting."""
    lines = [
        "| model | replicas | link | setting | alone, ms | step, ms | exposed | to DiLoCo's loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in options.workloads:
        for replicas in options.replicas:
            steps = steps_to_the_loss(by_seed(rows, options, name, replicas))
            for rate in options.rates:
                for key in keys(options, replicas, rate):
                    if rate == UNSHAPED or key.workload != name or key not in rows:
                        continue
                    alone_s, step_s = fmean(rows[key]["alone_s"]), median(rows[key]["step_s"])
                    exposed = f"{1.0 - alone_s / step_s:.1%}"
                    until = f"{steps[key.setting] * step_s:.0f} s" if key.setting in steps else "-"
                    bound = f" ({exposed})" if key.setting == PLAIN else ""
                    lines.append(
                        f"| {name} | {replicas} | {key.link} | {key.setting} | {alone_s * 1e3:.1f} "
                        f"| {step_s * 1e3:.1f} | {exposed} | {until}{bound} |"
                    )
    return lines


def steps_to_the_loss(runs: dict[str, dict[int, Row]]) -> dict[str, float]:
    """Mean steps until the loss with which plain DiLoCo of the same seed ends; none if not all get there."""
    found = {}
    for setting, of_seed in runs.items():
        pairs = paired(of_seed, runs.get(PLAIN, {}))
        steps = [reached(row["looks"], plain["looks"][-1][1]) for row, plain in pairs]
        known = [each for each in steps if each is not None]
        if known and len(known) == len(steps):
            found[setting] = fmean(known)
    return found


def main() -> None:
    """Run what is missing on each network, then print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=["chargpt", "resnet_demo"])
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600, help="a multiple of --every")
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--delay", type=int, default=5)
    parser.add_argument(
        "--rates", nargs="+", default=[UNSHAPED, "20mbit", "100mbit"], help=f"losses are of {UNSHAPED!r}"
    )
    parser.add_argument("--latency", default="50ms", help="one way")
    parser.add_argument("--rounds", type=int, default=3, help="that are timed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="later no run begins")
    parser.add_argument("--runs", type=Path, default=Path("outer.jsonl"))
    parser.add_argument("--rate", help=argparse.SUPPRESS)
    parser.add_argument("--until-s", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps % options.every:
        parser.error(f"--steps {options.steps} is not a multiple of --every {options.every}")
    if options.rate is not None:
        worker(options)
        return
    mode = emulate.enter()
    until_s = time.monotonic() + 60 * options.minutes
    networks = [(replicas, rate) for replicas in options.replicas for rate in options.rates]
    for replicas, rate in networks:
        if missing(options, replicas, rate) and time.monotonic() < until_s:
            delay_s = 0.0 if rate == UNSHAPED else emulate.parse_delay(options.latency)
            link = emulate.EmulatedLink(emulate.parse_rate(rate), delay_s)
            command = [sys.executable, *sys.argv, "--rate", rate, "--until-s", str(until_s)]
            with emulate.EmulatedNetwork(replicas, link, mode) as network:
                ranks = [network.popen(rank, command) for rank in range(replicas)]
                if any(rank.wait() for rank in ranks):
                    raise SystemExit(f"a rank failed on {rate}")
    rows = finished(options.runs)
    print("\n".join([*loss_table(rows, options), "", *time_table(rows, options)]))
    left = sum(missing(options, replicas, rate) for replicas, rate in networks)
    print(f"\n{left} runs are missing: give the command again" if left else "")


def missing(options: argparse.Namespace, replicas: int, rate: str) -> int:
    """How many runs on a network are not in the file."""
    return len(set(keys(options, replicas, rate)) - finished(options.runs).keys())


if __name__ == "__main__":
    main()
