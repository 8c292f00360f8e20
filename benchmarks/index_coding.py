"""How many bits does an index cost, and how long does it take?

k of n indices in the form that `gradwire.codec.indices` takes, beside int32 indices (written and read by one
copy), beside the entropy log2 C(n, k), and beside Rice's code for the gaps with the best parameter, whose
length depends on the indices (sizes only, computed from the indices). Uniformly random indices, and those of
the largest magnitudes of a heavy-tailed tensor in layers and rows of different scale; fresh in every
repetition. The settings of a repetition run in mixed order; `A/A` is the 95 % interval of the paired ratio
of encoding to encoding. One thread, and its own clock, which stands still while others have the core; rates
by the wall's clock are in the JSON. Every repetition checks that the indices come back; first, the packed
words are compared with those of the plain-torch reference at a smaller n.

Goal: at most 1.08 of the entropy, and at least 0.3 G indices/s in each direction (at 1 % and 10 %).

    python benchmarks/index_coding.py [--numel 32000000] [--repetitions 9] [--json PATH]
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gradwire.codec.indices import elias_fano_planes, index_form, pack_indices, unpack_indices
from gradwire.kernels.chosen import pack_elias_fano
from gradwire.kernels.topk import topk_indices
from gradwire_lab.bench.statistics import mixed, paired

SHARES = (0.001, 0.01, 0.03, 0.1, 0.3)
TIMED_SHARES = (0.01, 0.1)
LEAST_TIMED = 2_000_000  # indices; fewer are coded several times, so that the clock can tell
LAYERS, ROW = 40, 512


def uniform(numel: int, count: int) -> Tensor:
    """Any `count` of `numel` indices, all equally likely."""
    return topk_indices(torch.rand(numel), count)


def layered(numel: int, count: int) -> Tensor:
    """The `count` largest magnitudes of products of two normal numbers, scaled by layer and by row."""
    rows = torch.randn(-(-numel // ROW)).mul_(0.5)
    layers = torch.randn(LAYERS).repeat_interleave(-(-rows.numel() // LAYERS))[: rows.numel()]
    scale = (rows + layers).exp_().view(-1, 1)
    values = torch.randn(rows.numel(), ROW).mul_(torch.randn(rows.numel(), ROW)).mul_(scale)
    return topk_indices(values.view(-1)[:numel].contiguous(), count)


KINDS: dict[str, Callable[[int, int], Tensor]] = {"uniform": uniform, "top-k": layered}


def entropy_bits(count: int, numel: int) -> float:
    """log2 C(numel, count)."""
    log = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return log / math.log(2)


def rice_bits(chosen: Tensor) -> int:
    """Length of the gaps in Rice's code with the best parameter b: b + 1 + ⌊(gap − 1)/2^b⌋ bits each."""
    gaps = chosen.diff(prepend=chosen.new_full((1,), -1)) - 1
    return min(int((gaps >> b).sum()) + gaps.numel() * (b + 1) for b in range(32))


def check_against_reference(numel: int) -> None:
    """The kernels' words are the reference's, for every kind and share."""
    for draw in KINDS.values():
        for share in SHARES:
            chosen = draw(numel, round(share * numel))
            planes = elias_fano_planes(chosen.numel(), numel)
            expected = pack_elias_fano.plain(chosen, planes)
            assert torch.equal(pack_elias_fano(chosen, planes), expected)


def timed(work: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Seconds of one call, on the thread's own clock and on the wall's."""
    cpu_s, wall_s = time.thread_time(), time.perf_counter()
    for _ in range(calls):
        work()
    return (time.thread_time() - cpu_s) / calls, (time.perf_counter() - wall_s) / calls


def measure(kind: str, share: float, numel: int, repetitions: int) -> dict[str, Any]:
    """One row of the table."""
    count = round(share * numel)
    calls = max(1, LEAST_TIMED // count)
    seconds: dict[str, list[tuple[float, float]]] = {}
    rice = []
    for repetition in range(repetitions):
        chosen = KINDS[kind](numel, count)
        packed = pack_indices(chosen, numel)
        listed = chosen.int()
        assert torch.equal(unpack_indices(packed, count, numel), listed)
        rice.append(rice_bits(chosen))
        work: list[tuple[str, Callable[[], Any]]] = [
            ("encode", lambda chosen=chosen: pack_indices(chosen, numel)),
            ("encode again", lambda chosen=chosen: pack_indices(chosen, numel)),
            ("decode", lambda packed=packed: unpack_indices(packed, count, numel)),
            ("int32 write", lambda chosen=chosen: chosen.int()),
            ("int32 read", lambda listed=listed: listed.clone()),
        ]
        for name, call in mixed(work, repetition):
            seconds.setdefault(name, []).append(timed(call, calls))
    cpu, wall = (
        {name: [pair[clock] for pair in pairs] for name, pairs in seconds.items()} for clock in (0, 1)
    )
    again = paired(cpu["encode again"], cpu["encode"])
    entropy = entropy_bits(count, numel)
    return {
        "kind": kind,
        "share": share,
        "form": index_form(count, numel),
        "bits": 32 * packed.numel() / count,
        "bits_int32": 32.0,
        "bits_rice": median(rice) / count,
        "bits_entropy": entropy / count,
        "to_entropy": 32 * packed.numel() / entropy,
        "rice_to_entropy": median(rice) / entropy,
        "g_per_s": {name: count / median(values) / 1e9 for name, values in cpu.items()},
        "g_per_s_wall": {name: count / median(values) / 1e9 for name, values in wall.items()},
        "aa": [again.low, again.high],
    }


HEAD = f"{'indices':<9}{'k/n':>6}{'form':>7} │{'bits':>7}{'int32':>7}{'Rice':>7}{'entropy':>9} │"
HEAD += f"{'ours':>7}{'Rice':>7}{'':<11}│{'encode':>7}{'decode':>7}{'int32 write':>12}{'read':>6}{'A/A':>13}"


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    rate, aa = row["g_per_s"], f"{row['aa'][0]:.2f} … {row['aa'][1]:.2f}"
    sizes = f"{row['bits']:>7.2f}{32:>7}{row['bits_rice']:>7.2f}{row['bits_entropy']:>9.2f}"
    ratios = f"{row['to_entropy']:>7.3f}{row['rice_to_entropy']:>7.3f} of entropy"
    rates = (
        f"{rate['encode']:>7.2f}{rate['decode']:>7.2f}{rate['int32 write']:>12.2f}{rate['int32 read']:>6.2f}"
    )
    return f"{row['kind']:<9}{row['share']:>6.1%}{row['form']:>7} │{sizes} │{ratios}│{rates}{aa:>13}"


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=32_000_000)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    check_against_reference(min(arguments.numel, 500_000))
    print(f"{arguments.numel} elements; bits per index, and G indices per CPU second\n{HEAD}")
    rows = []
    for kind in KINDS:
        for share in SHARES:
            rows.append(measure(kind, share, arguments.numel, arguments.repetitions))
            print(line(rows[-1]), flush=True)
    size = max(row["to_entropy"] for row in rows)
    timed_rows = [row["g_per_s"] for row in rows if row["share"] in TIMED_SHARES]
    rate = min(min(row["encode"], row["decode"]) for row in timed_rows)
    print(f"goal: largest size at most 1.08 of the entropy: {size:.3f},", "met" if size <= 1.08 else "missed")
    print(f"goal: slowest rate at least 0.3 G/s: {rate:.2f},", "met" if rate >= 0.3 else "missed")
    if arguments.json:
        document = {"numel": arguments.numel, "repetitions": arguments.repetitions, "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
