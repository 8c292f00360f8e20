"""How fast is QSGD, packed, beside what PyTorch's quantization hook computes?

A whole gradient on one thread is encoded, and one payload is decoded into a mean. The peer is the arithmetic
of `quantization_pertensor_hook`, from the installed torch: an observer's minimum and maximum, scale and zero
point, rounding, clamping, a cast to uint8, and back to a mean. It has one scale for everything and rounds to
nearest; QSGD has one per 512 elements and draws a random number for each. Beside it, what else torch offers:
its fused operators `quantize_per_tensor` and `quantize_per_channel` with the same observers, the per-channel
hook (a Python loop over channels), and QSGD in eager torch. Every result of every repetition is checked: ours
against float64, the others by their bound. Twice each, for the A/A spread, are the hook and ours. Goal: 5
times faster than the hook, encoding and decoding together; 10 is the stretch.

    python benchmarks/qsgd.py [--elements 33554432] [--repetitions 7] [--json PATH]
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as hooks

from gradwire.codec.base import Codec
from gradwire.contrib.stochastic_levels import qsgd_codec
from gradwire.kernels.compiler import imported, prepare
from gradwire.kernels.noise import random_words
from gradwire.unit.context import ExchangeContext
from gradwire_lab.bench.runner import machine
from gradwire_lab.bench.statistics import mixed, paired

GOAL, STRETCH, BUCKET = 5.0, 10.0, 512
AT = ExchangeContext(step=0, unit=0, rank=0, world=1)
Payload = Any
Encode = Callable[[Tensor], Payload]
Decode = Callable[[Payload, Tensor], Tensor]  # the second is a mean that may be written to
Check = Callable[[Tensor, Payload, Tensor], None]


@dataclass(frozen=True)
class Job:
    """One way to do it."""

    encode: Encode
    decode: Decode
    check: Check


def hook_encode(x: Tensor) -> Payload:
    """As `quantization_pertensor_hook` on one rank."""
    observer = MinMaxObserver()
    observer(x)
    scale, zero = observer.calculate_qparams()
    pair = torch.FloatTensor([scale, zero])
    return hooks._quantize_per_tensor_backend(x, pair[0], pair[1]), pair


def hook_decode(payload: Payload, mean: Tensor) -> Tensor:
    """The same, of one payload."""
    quantized, pair = payload
    total = torch.zeros_like(quantized, dtype=torch.float32)
    total += hooks._dequantize_per_tensor_backend(quantized, pair[0], pair[1])
    return total / AT.world


def channels_encode(x: Tensor) -> Payload:
    """As `quantization_perchannel_hook` on one rank."""
    rows = torch.nn.functional.pad(x, (0, BUCKET - len(x) % BUCKET)).view(-1, BUCKET)
    observer = PerChannelMinMaxObserver()
    observer(rows)
    pairs = torch.stack(observer.calculate_qparams())
    return hooks._quantize_per_channel_backend(rows, pairs[0], pairs[1]), pairs


def channels_decode(payload: Payload, mean: Tensor) -> Tensor:
    """The same, of one payload."""
    quantized, pairs = payload
    total = torch.zeros_like(quantized, dtype=torch.float32)
    total += hooks._dequantize_per_channel_backend(quantized, pairs[0], pairs[1])
    return torch.flatten(total)[: len(mean)] / AT.world


def fused_encode(x: Tensor) -> Payload:
    """torch's own operator, in one pass after the observer's."""
    observer = MinMaxObserver()
    observer(x)
    scale, zero = observer.calculate_qparams()
    return torch.quantize_per_tensor(x, scale, zero, torch.quint8)


def fused_channels_encode(x: Tensor) -> Payload:
    """The same with a scale per 512 elements."""
    rows = x.view(-1, BUCKET)
    observer = PerChannelMinMaxObserver()
    observer(rows)
    scales, zeros = observer.calculate_qparams()
    return torch.quantize_per_channel(rows, scales, zeros, 0, torch.quint8)


def fused_decode(payload: Payload, mean: Tensor) -> Tensor:
    """torch's own operator."""
    return mean.zero_().add_(payload.dequantize().view(-1))


def eager_encode(bits: int) -> Encode:
    """QSGD in plain torch."""
    levels = 2 ** (bits - 1) - 1

    def encode(x: Tensor) -> Payload:
        rows = x.view(-1, BUCKET)
        steps = torch.linalg.vector_norm(rows, dim=1, keepdim=True).div_(levels)
        codes = (rows / steps).add_(torch.rand_like(rows)).floor_().add_(levels).to(torch.uint8)
        return steps, codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4

    return encode


def eager_decode(bits: int) -> Decode:
    """The inverse."""
    levels = 2 ** (bits - 1) - 1

    def decode(payload: Payload, mean: Tensor) -> Tensor:
        steps, codes = payload
        if bits == 4:
            codes = torch.stack((codes & 0xF, codes >> 4), dim=2).view(-1, BUCKET)
        return mean.zero_().add_((codes.float() - levels).mul_(steps).view(-1))

    return decode


def ours_decode(codec: Codec) -> Decode:
    """As an exchange does it."""

    def decode(payload: Payload, mean: Tensor) -> Tensor:
        codec.add_decoded(payload, mean.zero_(), 1.0 / AT.world, AT)
        return mean

    return decode


def within(bound: Callable[[Payload], Tensor | float]) -> Check:
    """Raise where the mean is farther from x than the payload's bound."""

    def check(x: Tensor, payload: Payload, mean: Tensor) -> None:
        limit = torch.as_tensor(bound(payload))
        width = len(x) // limit.numel() if limit.numel() > 1 else len(x)
        moved = (mean - x).abs().view(-1, width).amax(1)
        if not bool((moved <= limit.view(-1)[: len(moved)] * (1 + 1e-3)).all()):
            raise AssertionError("farther from the gradient than a level")

    return check


def exact(bits: int) -> Check:
    """Raise unless every code is the floor of a quotient plus noise, in float64, and the mean is theirs."""
    levels = 2 ** (bits - 1) - 1
    key = int(torch.randint(2**63 - 1, (), generator=AT.private()))

    def check(x: Tensor, payload: Payload, mean: Tensor) -> None:
        buckets = len(x) // BUCKET
        steps, packed = payload[: 4 * buckets].view(torch.float32).numpy(), payload[4 * buckets :].numpy()
        for first in range(0, buckets, 2048):
            here = slice(first, min(first + 2048, buckets))
            elements = slice(here.start * BUCKET, here.stop * BUCKET)
            step = steps[here].astype(np.float64)[:, None]
            rows = x[elements].double().numpy().reshape(-1, BUCKET)
            if np.abs(np.linalg.norm(rows, axis=1) / (levels * step[:, 0]) - 1).max() > 2**-20:
                raise AssertionError("not the norms")
            codes = packed[elements.start * bits // 8 : elements.stop * bits // 8]
            if bits == 4:
                codes = np.stack((codes & 0xF, codes >> 4), axis=1).reshape(-1)
            codes = codes.astype(np.int64)
            codes = np.where(codes > levels, codes - 2**bits, codes).reshape(-1, BUCKET)
            noise = random_words(key, codes.size, elements.start).numpy() >> 8
            sums = rows / step + noise.reshape(codes.shape) / 2**24
            # float32's quotient errs by 2^-22 of at most 127: near an integer either neighbour is right.
            wrong = (codes != np.floor(sums)) & (np.abs(sums - np.rint(sums)) > 1e-4)
            if wrong.any():
                raise AssertionError("not the levels")
            values = codes.astype(np.float32) * steps[here, None]
            if not np.array_equal(values.reshape(-1), mean[elements].numpy()):
                raise AssertionError("not the mean")

    return check


def jobs() -> dict[str, Job]:
    """All ways, by name; x is handed to `take` as a copy of its own."""
    hook = Job(hook_encode, hook_decode, within(lambda payload: float(payload[1][0]) / 2))
    found = {"hook": hook, "hook again": hook}
    for bits in (8, 4):
        codec, check = qsgd_codec(bits, BUCKET), exact(bits)
        ours = Job(lambda x, codec=codec: codec.encode(x, AT), ours_decode(codec), check)
        taking = Job(lambda x, codec=codec: codec.take(x, AT), ours_decode(codec), check)
        eager = Job(eager_encode(bits), eager_decode(bits), within(lambda payload: payload[0]))
        found |= {f"qsgd {bits}": ours, f"qsgd {bits} again": ours}
        found |= {f"qsgd {bits}, take": taking, f"eager qsgd {bits}": eager}
    return found | {
        "quantize_per_tensor": Job(fused_encode, fused_decode, within(lambda p: p.q_scale() / 2)),
        "quantize_per_channel": Job(
            fused_channels_encode, fused_decode, within(lambda p: p.q_per_channel_scales() / 2)
        ),
        "hook, channels": Job(channels_encode, channels_decode, within(lambda p: p[1][0][:-1] / 2)),
    }


def repetition(every: dict[str, Job], n: int, number: int) -> dict[str, dict[str, float]]:
    """Wall-clock and CPU seconds of every job on one fresh draw."""
    gradient, x, mean = torch.randn(n), torch.empty(n), torch.empty(n)
    seconds = {}
    for name in mixed(list(every), number):
        job = every[name]
        x.copy_(gradient)
        mean.fill_(torch.nan)
        cpu, start = time.process_time(), time.perf_counter()
        payload = job.encode(x)
        between = time.perf_counter()
        found = job.decode(payload, mean)
        end = time.perf_counter()
        spent = time.process_time() - cpu
        seconds[name] = {
            "encode_s": between - start,
            "decode_s": end - between,
            "wall_s": end - start,
            "cpu_s": spent,
        }
        job.check(gradient, payload, found)
    return seconds


def ratio(runs: list[dict[str, dict[str, float]]], top: str, bottom: str, clock: str) -> dict[str, float]:
    """A paired ratio of two jobs."""
    return vars(paired([run[top][clock] for run in runs], [run[bottom][clock] for run in runs]))


def compared(names: list[str], runs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of every job, and the hook's time over its time; the A/A spreads."""
    clocks = ("encode_s", "decode_s", "wall_s", "cpu_s")
    return {
        "medians": {
            name: {clock: median(run[name][clock] for run in runs) for clock in clocks} for name in names
        },
        "hook_over": {name: {clock: ratio(runs, "hook", name, clock) for clock in clocks} for name in names},
        "again_over": {
            name: ratio(runs, f"{name} again", name, "wall_s") for name in ("hook", "qsgd 8", "qsgd 4")
        },
        "runs": runs,
    }


def interval(of: dict[str, float]) -> str:
    """A paired ratio's 95 % interval."""
    return f"{of['low']:.2f} … {of['high']:.2f}"


def table(results: dict[str, Any], n: int) -> Table:
    """One row per job; times in milliseconds."""
    title = f"{n / 2**20:.3g} Mi float32, one thread, ms"
    view = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    view.add_column("what", no_wrap=True)
    for head in ("encode", "decode", "both", "CPU", "encode G/s", "hook/this", "95 %", "in CPU", "A/A"):
        view.add_column(head, justify="right", no_wrap=True)
    for name, of in results["medians"].items():
        if not name.endswith("again"):
            faster = results["hook_over"][name]
            view.add_row(
                name,
                *(f"{1e3 * of[clock]:.1f}" for clock in ("encode_s", "decode_s", "wall_s", "cpu_s")),
                f"{n / of['encode_s'] / 1e9:.2f}",
                f"{faster['wall_s']['ratio']:.2f}",
                interval(faster["wall_s"]),
                f"{faster['cpu_s']['ratio']:.2f}",
                interval(results["again_over"][name]) if name in results["again_over"] else "",
            )
    return view


def verdict(results: dict[str, Any]) -> str:
    """What became of the goal."""
    lines = []
    for name in ("qsgd 8", "qsgd 4"):
        reached = results["hook_over"][name]["wall_s"]["ratio"]
        met = "stretch met" if reached >= STRETCH else "met" if reached >= GOAL else "missed"
        lines.append(f"goal: {name} {GOAL:.0f} times faster than the hook: {met} ({reached:.1f})")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=2**25, help=f"a multiple of {BUCKET}")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.elements % BUCKET:
        parser.error(f"--elements {arguments.elements} is not a multiple of {BUCKET}")
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    warnings.filterwarnings("ignore", category=UserWarning)  # torch's observers and operators are deprecated
    prepare(imported())
    every = jobs()
    repetition(every, arguments.elements, 0)  # the first use of memory, caches and libraries does not count
    runs = [repetition(every, arguments.elements, number) for number in range(arguments.repetitions)]
    results = compared(list(every), runs)
    Console(width=max(Console().width, 130)).print(table(results, arguments.elements))
    print(f"seed {arguments.seed}; every result checked\n{verdict(results)}")
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        document = {"settings": settings, "machine": machine(), "results": results}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
