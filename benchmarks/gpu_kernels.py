"""What do kernels for devices cost beside a copy on the device, and what does attaching cost beside DDP?

Needs a CUDA device, and says so where there is none. Rates are bytes that a kernel must read and write,
divided by its time, as a share of those of a copy in the same run. Buffers are larger than any cache.

    PYTHONPATH=src python benchmarks/gpu_kernels.py [--numel 100000000] [--json PATH]
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api.configuration import PlacementName
from gradwire.kernels.blocks import add_blocks, encode_blocks
from gradwire.kernels.chunks import chunk_topk_indices
from gradwire.kernels.compensation import compensate, compensate_momentum
from gradwire.kernels.flagged import poison, zero_idle
from gradwire.kernels.layouts import BlockKind, Blocks, Grid, ScaledBlocks
from gradwire.kernels.pieces import Pieces
from gradwire.kernels.places import take
from gradwire.kernels.signs import add_signs, pack_signs
from gradwire.kernels.stochastic import add_quantized, quantize
from gradwire.kernels.topk import topk_indices

WORLD = 8
BLOCK = 256
AHEAD = 4_000_000
"""Cycles of a device: some two milliseconds, in which the host makes a dozen launches."""
GOAL_DENSE = 1.02
GOAL_HIDDEN = 0.97
"""Copies out and back beside the computation."""
QUIET = "no communication"
GOALS_LINK = {"int8, placement=host": 0.9}


class Figure(NamedTuple):
    """One number, and its goal where there is one; `at_least` says on which side of it is good."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = True

    def text(self) -> str:
        """A line."""
        if self.goal is None:
            return f"{self.value:.3g} {self.unit}"
        met = self.value >= self.goal if self.at_least else self.value <= self.goal
        side = "at least" if self.at_least else "at most"
        return f"{self.value:.3g} {self.unit}, goal {side} {self.goal:g}: {'met' if met else 'missed'}"


Measure = Callable[[], list[Figure]]


def seconds(call: Callable[[], object], repetitions: int = 15, ahead: int = AHEAD) -> float:
    """The median time of `call` on the device, after three calls that compile and warm up.

    The device is busy for `ahead` cycles first, so that it does not wait for launches.
    """
    for _ in range(3):
        call()
    times = []
    for _ in range(repetitions):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(ahead)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return median(times)


def host_seconds(call: Callable[[], object], repetitions: int = 50) -> float:
    """The median time until `call` returns, while the device has nothing else to do."""
    times = []
    for _ in range(repetitions + 5):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return median(times[5:])


def normal(*shape: int) -> Tensor:
    """The same numbers each time."""
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def copy_rate(numel: int) -> float:
    """Bytes per second, read and written."""
    x, y = normal(numel), torch.empty(numel, device="cuda")
    return 8 * numel / seconds(lambda: y.copy_(x))


def passes(numel: int) -> dict[str, tuple[Callable[[], object], float, float | None]]:
    """Each kernel: the call, the bytes that it must move for an element, and its share of a copy as goal."""
    grad, memory, out = normal(numel), normal(numel), torch.empty(numel, device="cuda")
    planes, zero = (memory, out), torch.zeros(1, device="cuda")
    found: dict[str, tuple[Callable[[], object], float, float | None]] = {
        "compensate": (lambda: compensate(out, memory, grad, 1.0), 12, 0.85),
        "compensate_momentum": (lambda: compensate_momentum(planes, planes, grad, 0.9), 20, 0.85),
        "chunk_topk_indices": (lambda: chunk_topk_indices(grad, grad.numel() // 100 | 1, 1), 4, 0.8),
        "poison, nothing to do": (lambda: poison([out], zero), 0, None),
        "zero_idle, nothing idle": (
            partial(zero_idle, out, Pieces([(0, 0, numel)]), zero.bool()), 0, None,
        ),
    }  # fmt: skip
    for kind in get_args(BlockKind):
        blocks = ScaledBlocks((numel,), BLOCK, kind)
        scales = torch.empty(blocks.count, device="cuda")
        codes = torch.empty(blocks.code_bytes, dtype=torch.uint8, device="cuda")
        width = blocks.code_bytes / numel
        encode = partial(encode_blocks, out, blocks, scales, codes, True)
        add = partial(add_blocks, scales, codes, blocks, out, 1.0)
        found[f"encode_blocks {kind}"] = encode, 8 + width, 0.8
        found[f"add_blocks {kind}"] = add, 8 + width, 0.85
    signs = Blocks((numel,))
    means = torch.empty(1, 1, device="cuda")
    bits = torch.empty(signs.bytes, dtype=torch.uint8, device="cuda")
    found["pack_signs"] = partial(pack_signs, out, signs, means, bits, leave=True), 12.1, 0.7
    found["add_signs"] = partial(add_signs, means, bits, signs, out), 8.1, 0.7
    return {**found, **levels(out)}


def levels(out: Tensor) -> dict[str, tuple[Callable[[], object], float, float | None]]:
    """The passes of QSGD in buckets of 512, and of TernGrad, whose norm is that of all of `out`."""
    found: dict[str, tuple[Callable[[], object], float, float | None]] = {}
    grids = {f"{bits} bits": Grid((out.numel(),), 512, bits) for bits in (8, 4)}
    grids["TernGrad"] = Grid((out.numel(),), None, 2, "max")
    for name, grid in grids.items():
        steps = torch.empty(grid.buckets, device="cuda")
        codes = torch.empty(grid.code_bytes, dtype=torch.uint8, device="cuda")
        width = grid.code_bytes / out.numel()
        twice = 4 if grid.bucket is None else 0  # it is read for the norm first
        encode = partial(quantize, out, grid, 1, steps, codes, subtract=True)
        found[f"quantize {name}"] = encode, 8 + twice + width, 0.7
        found[f"add_quantized {name}"] = (
            partial(add_quantized, steps, codes, grid, out, 1.0), 8 + width, 0.7,
        )  # fmt: skip
    return found


def kernel_figures(numel: int) -> list[Figure]:
    """Shares of a copy's rate; microseconds where nothing is moved."""
    rate = copy_rate(numel)
    figures = [Figure("copy", rate / 1e12, "TB/s")]
    for name, (call, width, goal) in passes(numel).items():
        taken_s = seconds(call)
        if width:
            figures.append(Figure(name, width * numel / taken_s / rate, "of a copy", goal))
        else:
            figures.append(Figure(name, taken_s * 1e6, "µs", 10.0, at_least=False))
    return figures


def topk_figures(numel: int, ratio: float = 0.01) -> list[Figure]:
    """Error feedback and exact top-k, beside the same in torch."""
    grad, memory, k = normal(numel), torch.zeros(numel, device="cuda"), int(ratio * numel)

    def eager() -> None:
        memory.add_(grad)
        indices = memory.abs().topk(k).indices
        _values = memory[indices]
        memory[indices] = 0.0

    def ours() -> None:
        compensate(memory, memory, grad, 1.0)
        take(memory, topk_indices(memory, k))

    ours_s, eager_s = seconds(ours), seconds(eager, repetitions=5)
    return [
        Figure("feedback and exact top 1 %", ours_s * 1e3, "ms"),
        Figure("the same in eager torch, as multiple", eager_s / ours_s, "times", 3.0),
    ]


def int8_figures(numel: int) -> list[Figure]:
    """The local work of one rank of eight in an all-reduce in int8: encode, sum own shard, decode."""
    shard = numel // WORLD // BLOCK * BLOCK
    whole = ScaledBlocks((shard * WORLD,), BLOCK, "int8")
    part = ScaledBlocks((shard,), BLOCK, "int8")
    x, out = normal(whole.numel), torch.empty(whole.numel, device="cuda")
    scales = torch.empty(whole.count, device="cuda")
    codes = torch.empty(whole.code_bytes, dtype=torch.uint8, device="cuda")
    own = torch.empty(part.count, device="cuda"), torch.empty(shard, dtype=torch.uint8, device="cuda")
    total = torch.empty(shard, device="cuda")

    def ours() -> None:
        encode_blocks(x, whole, scales, codes, True)
        total.zero_()
        for sent in zip(scales.view(WORLD, -1), codes.view(WORLD, -1), strict=True):
            add_blocks(*sent, part, total, 1 / WORLD)
        encode_blocks(total, part, *own, True)
        add_blocks(scales, codes, whole, out.zero_(), 1.0)

    def eager() -> None:
        table = x.view(-1, BLOCK)
        largest = table.abs().amax(1, keepdim=True) / 127
        coded = (table / largest).round().clamp(-127, 127).to(torch.int8)
        x.sub_((coded * largest).view(-1))
        summed = (coded * largest).view(WORLD, -1).sum(0).view(-1, BLOCK) / WORLD
        again = summed.abs().amax(1, keepdim=True) / 127
        _codes = (summed / again).round().clamp(-127, 127).to(torch.int8)
        out.copy_((coded * largest).view(-1))

    ours_s, eager_s = seconds(ours), seconds(eager, repetitions=5)
    return [
        Figure(f"int8, local work of 1 rank of {WORLD}", ours_s * 1e3, "ms"),
        Figure("the same in eager torch, as multiple", eager_s / ours_s, "times", 1.5),
    ]


def host_figures(numel: int = 1 << 20) -> list[Figure]:
    """How long the thread that launches is busy with one unit: compensate, encode, decode."""
    grad, memory, out = normal(numel), normal(numel), torch.empty(numel, device="cuda")
    blocks = ScaledBlocks((numel,), BLOCK, "int8")
    scales = torch.empty(blocks.count, device="cuda")
    codes = torch.empty(blocks.code_bytes, dtype=torch.uint8, device="cuda")

    def int8() -> None:
        compensate(memory, memory, grad, 1.0)
        encode_blocks(memory, blocks, scales, codes, True)
        add_blocks(scales, codes, blocks, out.zero_(), 1.0)

    def topk() -> None:
        compensate(memory, memory, grad, 1.0)
        take(memory, topk_indices(memory, numel // 100))

    calls = {"int8": int8, "top 1 %": topk}
    return [
        Figure(f"host time of a unit, {name}", 1e6 * host_seconds(call), "µs", 150.0, at_least=False)
        for name, call in calls.items()
    ]


def _step(
    model: DistributedDataParallel, inputs: Tensor, optimizer: torch.optim.Optimizer, quiet: bool = False
) -> None:
    optimizer.zero_grad()
    with model.no_sync() if quiet else nullcontext():
        model(inputs).square().mean().backward()
    optimizer.step()


class Trained(NamedTuple):
    """A model that is trained in a way of its own: a step, the wire if there is one, and its GPU memory."""

    step: Callable[[], None]
    wire: gradwire.Wire | None
    bytes: int


def trained(
    recipe: str | None, place: PlacementName = "auto", *, width: int = 2048, layers: int = 8
) -> Trained:
    """By DDP alone without a recipe, and by no communication at all with `QUIET`."""
    before, inputs = torch.cuda.memory_allocated(), normal(2048, width)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to("cuda")
    ddp = DistributedDataParallel(model, device_ids=[0])
    optimizer, wire = torch.optim.SGD(ddp.parameters(), lr=1e-3), None
    if recipe is not None and recipe != QUIET:
        wire = gradwire.attach(ddp, optimizer, recipe, placement=place)
    step = partial(_step, ddp, inputs, optimizer, quiet=recipe == QUIET)
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    return Trained(step, wire, torch.cuda.memory_allocated() - before)


@contextmanager
def one_rank() -> Iterator[None]:
    """NCCL with a rank that is alone, and does all that it would do with others."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    with patch("gradwire._api.attach.is_alone", lambda _comm: False):
        yield
    dist.destroy_process_group()


def attach_figures(place: PlacementName, steps: int = 20) -> list[Figure]:
    """`dense` in a placement beside DDP, and beside no communication, in turns; and what memory it takes."""
    with one_rank():
        trained(None)  # libraries take memory of their own, once
        plain, quiet, dense, int8 = (
            trained(None),
            trained(QUIET),
            trained("dense", place),
            trained("int8", place),
        )
        times = [
            [seconds(partial(_repeated, each.step, steps), 1, 0) / steps for each in (plain, quiet, dense)]
            for _ in range(5)
        ]
        busy_s = [host_seconds(each.step, 20) for each in (int8, plain)]
        assert int8.wire is not None
        report, where = int8.wire.report(), f"placement={place}"
    grown = int8.bytes - plain.bytes
    figures = [
        Figure(f"step with dense beside DDP, {where}", median(d / p for p, _q, d in times), "times",
               GOAL_DENSE, at_least=False),
        Figure(f"speed with dense beside no communication, {where}", median(q / d for _p, q, d in times),
               "times", GOAL_HIDDEN if place == "host" else None),
        Figure(f"host time of a step with int8 beyond DDP's, {where}", 1e3 * (busy_s[0] - busy_s[1]), "ms",
               2.0 if place == "device" else None, at_least=False),
    ]  # fmt: skip
    if place == "host":
        return [
            *figures,
            Figure("copies of a step", report.copied_s * 1e3, "ms"),
            Figure("memory of the GPU, predicted 0", grown / 2**20, "MiB", 1.0, at_least=False),
            Figure("pinned memory", report.pinned_bytes / 2**20, "MiB"),
        ]
    share = grown / report.memory_bytes
    return [*figures, Figure("memory of the GPU beside the report's", share, "times", 1.02, at_least=False)]


def _repeated(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()


def link_figures() -> list[Figure]:
    """Speed over an emulated link beside no communication, on two ranks that share the GPU."""
    script = Path(__file__).with_name("gpu_link.py")
    with TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        subprocess.run([sys.executable, str(script), "--json", str(found)], check=True)
        speeds = json.loads(found.read_text(encoding="utf-8"))["speeds"]
    return [
        Figure(f"over 10 Gbit/s, {name}", speed, "of the speed without communication", GOALS_LINK.get(name))
        for name, speed in speeds.items()
    ]


def groups(numel: int) -> dict[str, Measure]:
    """All figures, by what is measured together."""
    return {
        "kernels": partial(kernel_figures, numel),
        "top-k": partial(topk_figures, numel),
        "int8": partial(int8_figures, numel),
        "host time": host_figures,
        "by way of the host": partial(attach_figures, "host"),
        "on the device": partial(attach_figures, "device"),
        "link": link_figures,
    }


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--numel", type=int, default=100_000_000, help="elements of a kernel's tensor")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device: nothing is measured")
        return
    found = []
    for measure in groups(options.numel).values():
        for figure in measure():
            print(f"{figure.name}: {figure.text()}", flush=True)
            found.append(figure)
    if options.json is not None:
        options.json.write_text(json.dumps([each._asdict() for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
