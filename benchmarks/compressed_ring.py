"""How long does a compressed ring all-reduce take beside gloo's, on the gradients of a model in training?

Every repetition is a training step of all ranks: each computes the gradient of its own batch; then every
setting carries these same gradients, in mixed order and between barriers, over an emulated network whose link
is the bottleneck; then gloo's mean is applied. A time is that of the slowest rank, from the gradient to its
mean, the metric and the tables' use included. gloo's own all-reduce stands there twice (A/A). Every
repetition checks that the mean has the same bits on all ranks and is as near to the exact one as the bound
says. Bytes are those sent at rank 0's interface, where the network counts them.

Tables are made in the first step, which nobody counts, and not again in those that are; in training they are
renewed every 50 steps. What such a step costs beyond others, "near" counting its symbols and all-reducing the
counts, is measured by carrying the same gradient once more as if the tables were due, and printed apart.

Goal: "near" in at most 0.42 of gloo's time on 4 ranks at 200 and 500 Mbit/s; stretch 0.36. The paper has
0.616 and 0.470.

With `--libraries` zlib and zstd are in it, too, at level 1, in the same ring: every hop unpacks a frame, adds
and packs it again (the paper's figure 10).

    python benchmarks/compressed_ring.py [--rate 500mbit] [--workload resnet18] [--repetitions 7] [--json
    PATH] [--libraries]
"""

import argparse
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from huffman import Zstd
from torch import Tensor

from gradwire.comm import Comm, ProcessGroupComm
from gradwire.exchange.base import Decode
from gradwire.exchange.compose import forget
from gradwire.exchange.gcomp import REFRESH, SEGMENT, Gcomp
from gradwire.exchange.ring import RingAllReduce
from gradwire.kernels.compiler import imported, prepare
from gradwire.measure.metered import MeteredComm
from gradwire.metric import numerators, thresholds
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.unit.context import ExchangeContext, Replicated
from gradwire.unit.parameters import specs_of
from gradwire_lab import emulate
from gradwire_lab.bench.statistics import mixed, paired
from gradwire_lab.workloads import catalogue

GLOO, AGAIN = "gloo float32", "gloo float32 again"


@dataclass(frozen=True)
class Library(Gcomp):
    """A ring whose frames a general compressor makes of float32's bytes, without a loss."""

    name: str = "zlib"

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """As `Gcomp.start`, without tables."""
        torch.mul(x, 1.0 / comm.world, out=mean)
        x.zero_()
        ring = RingAllReduce(mean, PACKED[self.name], comm, self.schedule(mean.numel(), ctx))
        ring.start()

        def decode() -> None:
            ring.finish()
            for error in ring.failures:
                raise error

        return decode


class Zlib:
    """Frames by zlib at level 1; see `gradwire.exchange.ring.Framing`."""

    def bound(self, numel: int) -> int:
        return LENGTH_BYTES + -(-(4 * numel + numel // 8 + 4096) // 8) * 8

    def encode(self, x: Tensor, start: int, hop: int, room: Tensor) -> int:
        packed = self.pack(x.numpy().view(np.uint8))
        to, size = room.numpy(), LENGTH_BYTES + -(-packed.size // 8) * 8
        to[:LENGTH_BYTES].view(np.int64)[0] = packed.size
        to[LENGTH_BYTES : LENGTH_BYTES + packed.size] = packed
        to[LENGTH_BYTES + packed.size : size] = 0
        return size

    def round_trip(self, x: Tensor, start: int) -> None:
        pass

    def decode(self, data: Tensor, out: Tensor, start: int, hop: int, add: bool) -> None:
        frame = data.numpy()
        length = int(frame[:LENGTH_BYTES].view(np.int64)[0])
        came = torch.from_numpy(self.unpack(frame[LENGTH_BYTES : LENGTH_BYTES + length]).view(np.float32))
        if add:
            out += came
        else:
            out.copy_(came)

    def pack(self, data: Any) -> Any:
        """Bytes, compressed."""
        return np.frombuffer(zlib.compress(data, 1), np.uint8)

    def unpack(self, data: Any) -> Any:
        """And back; may be written to."""
        return np.frombuffer(bytearray(zlib.decompress(data)), np.uint8)


class ByZstd(Zlib):
    """Frames by zstd at level 1."""

    @cached_property
    def _zstd(self) -> Zstd:
        return Zstd({Zstd.LEVEL: 1}, 1 << 25)  # more than any segment

    def pack(self, data: Any) -> Any:
        return self._zstd.room[: self._zstd.compress(data)]

    def unpack(self, data: Any) -> Any:
        self._zstd.room[: data.size] = data
        return self._zstd.back[: self._zstd.decompress(data.size)].copy()


LENGTH_BYTES = 8
PACKED = {"zlib": Zlib(), "zstd": ByZstd()}
SETTINGS = {"near": Gcomp("near"), "levels": Gcomp("levels"), "lossless": Gcomp("lossless")}
LIBRARIES = {name: Library("lossless", name=name) for name in PACKED}
WARM_UP = 3
"""Steps of training before anything is timed: in the first there is no momentum."""
BETWEEN = range(REFRESH + 1, 2 * REFRESH)
"""Numbers of steps in which no tables are renewed, and in the one behind them they are."""
_TIMES = f"{'setting':<19}{'median s':>9}{'ratio':>7}{'95 % interval':>17}"
HEADER = _TIMES + f"{'CPU s':>8}{'MB sent':>9}{'of bound':>9}"


class Bench:
    """One rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(emulate.backend())
        self.comm = ProcessGroupComm(dist.group.WORLD)
        prepare(imported())
        workload = catalogue.workload(arguments.workload)
        self.loss, self.model = workload.loss, workload.model(seed=0)
        self.optimizer = workload.optimizer(self.model.parameters())
        self.batches = workload.batches(self.comm.rank, self.comm.world, seed=0)
        self.specs = specs_of(self.model)
        self.parameters = dict(self.model.named_parameters())
        self.unit = arguments.unit
        self.settings = SETTINGS | (LIBRARIES if arguments.libraries else {})
        self.flat_buffers = {
            name: FlatBuffer(
                0,
                self.specs,
                forget(replace(how, segment=arguments.segment)),
                self.boundaries([spec.numel for spec in self.specs]),
                CPU,
            )
            for name, how in self.settings.items()
        }

    def boundaries(self, sizes: Sequence[int]) -> list[int]:
        """One unit, if nothing else is asked for: gloo has one call."""
        return list(range(self.unit, sum(sizes), self.unit))

    def replica(self, name: str) -> Replicated:
        """What all ranks hold alike."""
        parameter = self.parameters[name]
        group = self.optimizer.param_groups[0]
        state: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        return Replicated(parameter.detach(), group, state, type(self.optimizer))

    def gradient(self) -> Tensor:
        """Of this rank's next batch, flat."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.model, next(self.batches)).backward()
        flat = []
        for spec in self.specs:
            parameter = self.parameters[spec.name]
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            flat.append(grad.reshape(-1))
        return torch.cat(flat)

    def apply(self, mean: Tensor) -> None:
        """One step of training."""
        done = 0
        for spec in self.specs:
            parameter = self.parameters[spec.name]
            parameter.grad = mean[done : done + spec.numel].view_as(parameter).clone()
            done += spec.numel
        self.optimizer.step()

    def timed(self, work: Callable[[], None]) -> dict[str, float]:
        """Seconds of the slowest rank, CPU seconds of all together, and bytes that this one has sent."""
        dist.barrier()
        before, cpu_s, wall_s = emulate.counters(), time.process_time(), time.perf_counter()
        work()
        spent = torch.tensor([time.perf_counter() - wall_s, time.process_time() - cpu_s], dtype=torch.float64)
        dist.barrier()
        after = emulate.counters()
        rows = [torch.empty_like(spent) for _ in range(self.comm.world)]
        dist.all_gather(rows, spent)
        table = torch.stack(rows)
        sent = float("nan") if before is None or after is None else float((after - before).tx_bytes)
        return {"s": float(table[:, 0].max()), "cpu_s": float(table[:, 1].sum()), "tx_bytes": sent}

    def carry(
        self, name: str, step: int, gradient: Tensor, commits: bool = True
    ) -> tuple[Tensor, dict[str, float]]:
        """One all-reduce by a setting, the next unit starting while the last round of this one travels."""
        flat_buffer, metered, mean = (
            self.flat_buffers[name],
            MeteredComm(self.comm),
            torch.empty_like(gradient),
        )
        x = gradient.clone()

        def work() -> None:
            decode: Decode | None = None
            for unit in flat_buffer.units:
                ctx = self.context(flat_buffer, step, unit.index)
                here = slice(unit.start, unit.stop)
                started = flat_buffer.exchange.start(x[here], mean[here], metered, ctx)
                if decode is not None:
                    decode()
                decode = started
            if decode is not None:
                decode()

        found = self.timed(work)
        if commits:
            flat_buffer.kept.commit()
        else:
            flat_buffer.kept.discard()
        return mean, found | {"metered_bytes": metered.wire_bytes}

    def context(self, flat_buffer: FlatBuffer, step: int, unit: int) -> ExchangeContext:
        """Of one unit."""
        parts = flat_buffer.units[unit].parts
        rank, world = self.comm.rank, self.comm.world
        return ExchangeContext(
            step, unit, rank, world, parts=parts, kept=flat_buffer.kept, replicas=self.replica
        )

    def check(self, name: str, mean: Tensor, gradient: Tensor) -> float:
        """The largest error as a share of the bound; the same bits on all ranks."""
        words = mean.view(torch.int32).long()
        extremes = torch.stack([words.sum(), (words * torch.arange(words.numel())).sum()])
        ends = torch.cat([extremes, -extremes])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        assert torch.equal(ends[:2], -ends[2:]), f"{name}: ranks differ"
        world, sums = self.comm.world, torch.stack([gradient.double(), gradient.double().abs()])
        dist.all_reduce(sums)
        exact, size = sums / world
        flat_buffer = self.flat_buffers[name]
        allowed = [
            self.allowed(name, unit.numel, self.context(flat_buffer, 1, unit.index))
            for unit in flat_buffer.units
        ]
        # W roundings of the code, 2W of plain float32 sums, and what lies below the normal range.
        bound = world * torch.cat(allowed) + 2 * world * 2.0**-24 * size + world * 2.0**-126
        share = float(((mean.double() - exact).abs() / bound).max())
        assert share <= 1.0, f"{name}: an error of {share} bounds"
        return share

    def allowed(self, name: str, numel: int, ctx: ExchangeContext) -> Tensor:
        """What one rounding may lose, (numel,) float64."""
        if name == "near":
            return 2.0 ** (thresholds(numel, ctx).double() - 151)
        return numerators(numel, ctx).double() * (2.0**-24 if name == "levels" else 0.0)

    def repetition(self, step: int, number: int) -> dict[str, dict[str, float]]:
        """All settings once, on a gradient of their own."""
        gradient, found, applied = self.gradient(), {}, torch.empty(0)
        for name in mixed([GLOO, AGAIN, *self.settings], number):
            if name in self.settings:
                mean, found[name] = self.carry(name, step, gradient)
                found[name]["share"] = self.check(name, mean, gradient)
            else:
                mean = gradient.clone()
                found[name] = self.timed(lambda mean=mean: summed(mean))
                applied = mean
        found["renewal"] = self.renewal(gradient, found["near"])
        self.apply(applied)
        return found

    def renewal(self, gradient: Tensor, usual: dict[str, float]) -> dict[str, float]:
        """What "near" takes longer, and sends more, where tables are renewed; the new ones are dropped."""
        _, found = self.carry("near", BETWEEN.stop, gradient, commits=False)
        return {key: found[key] - usual[key] for key in ("s", "cpu_s", "tx_bytes")}

    def measure(self, repetitions: int) -> dict[str, dict[str, list[float]]]:
        """All repetitions, after one in which tables are made."""
        for _ in range(WARM_UP):
            mean = self.gradient()
            summed(mean)
            self.apply(mean)
        self.repetition(0, 0)
        runs = [self.repetition(BETWEEN[number % len(BETWEEN)], number) for number in range(repetitions)]
        rows = {name: {key: [run[name][key] for run in runs] for key in runs[0][name]} for name in runs[0]}
        for name in (GLOO, AGAIN, *self.settings):
            row = rows[name]
            ratio = paired(row["s"], rows[GLOO]["s"])
            row["ratio"] = [ratio.ratio, ratio.low, ratio.high]
        return rows


CPU = torch.device("cpu")


def summed(mean: Tensor) -> None:
    """gloo's mean, in place."""
    dist.all_reduce(mean)
    mean.mul_(1.0 / dist.get_world_size())


def line(name: str, row: dict[str, list[float]]) -> str:
    """A setting as text."""
    ratio, low, high = row["ratio"]
    text = f"{name:<19}{median(row['s']):>9.3f}{ratio:>7.3f}{f'{low:.3f} … {high:.3f}':>17}"
    text += f"{median(row['cpu_s']):>8.2f}{median(row['tx_bytes']) / 1e6:>9.2f}"
    return text + (f"{max(row['share']):>9.2f}" if "share" in row else "")


def renewal_line(rows: dict[str, dict[str, list[float]]]) -> str:
    """What renewing tables adds to a step of "near", and spread over the steps between two renewals."""
    more_s, usual_s = median(rows["renewal"]["s"]), median(rows["near"]["s"])
    text = f"renewing tables: {more_s * 1e3:+.1f} ms in one step of {REFRESH}, "
    text += f"{more_s / REFRESH / usual_s:+.2%} of near's time on average "
    return text + f"({median(rows['renewal']['cpu_s']) * 1e3:+.0f} ms of CPU on all ranks)"


def worker(arguments: argparse.Namespace) -> None:
    """One rank; rank 0 prints and writes."""
    bench = Bench(arguments)
    rows = bench.measure(arguments.repetitions)
    if bench.comm.rank == 0:
        numel = sum(spec.numel for spec in bench.specs)
        print(f"{arguments.workload}, {numel} elements, {bench.comm.world} ranks, {arguments.rate}")
        print(HEADER)
        for name in (GLOO, AGAIN, *bench.settings):
            print(line(name, rows[name]), flush=True)
        print(renewal_line(rows))
        ratio = rows["near"]["ratio"][0]
        for what, goal in (("goal", 0.42), ("stretch", 0.36)):
            verdict = "met" if ratio <= goal else "missed"
            print(f"{what}: near in at most {goal} of gloo's time: {ratio:.3f}, {verdict}")
        if arguments.json:
            options = {key: str(value) for key, value in vars(arguments).items()}
            arguments.json.write_text(json.dumps({**options, "numel": numel, "rows": rows}, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--workload", default="resnet18")
    parser.add_argument("--unit", type=int, default=1 << 25, help="elements of a unit")
    parser.add_argument("--segment", type=int, default=SEGMENT, help="elements of a segment")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--libraries", action="store_true", help="zlib and zstd, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return
    command = [sys.executable, "-m", "gradwire", "net", "run", "--workers", str(arguments.workers)]
    command += ["--rate", arguments.rate, "--", sys.executable, __file__, *sys.argv[1:]]
    raise SystemExit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
