"""How good are planned boundaries, and how long does planning take?

Networks' tensors become ready in reverse order, by their multiply-adds; codecs cost what they cost on this
machine (measured here on one thread for 2^8 … 2^20 elements and fitted by B + γ·x, encode and decode
apart, or read from `--costs`); the link is the α and β of the options. All ways to cut are compared under
two models of a step: MergeComp's, in which encoding and decoding hold up the backward pass and whose optimum
the dynamic program is, and that of this package's reducer, in which a worker beside it encodes and decodes.
There, and as a check of the former, the optimum is found by brute force on the same network with
neighbouring tensors joined until 13 are left; at full size the reducer's plan stands beside one that was
searched for 25 times as long.

Planning is timed on a network of 314 tensors, every repetition on other ready times, by the thread's own
clock, which stands still while others have the core (the wall's is in the JSON); `A/A` is the 95 % interval
of the paired ratio of a planner to itself.

Goals: at most 1.02 of the optimum, and never worse than layer-wise, one group, even splits, Algorithm 2 at
Y = 2; 314 tensors in at most 10 ms (stretch 3 ms; Espresso reports 179 ms).

    python benchmarks/merge_planner.py [--world 4] [--rate 1e9] [--latency 1e-4] [--costs PATH] [--json PATH]
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch

from gradwire.codec.base import Codec
from gradwire.codec.select.topk import top_k
from gradwire.codec.signs import sign
from gradwire.codec.sparse import sparse
from gradwire.contrib.stochastic_levels import qsgd_codec
from gradwire.contrib.truncate import upper_bits
from gradwire.kernels.compiler import imported, prepare
from gradwire.planning import shapes
from gradwire.planning.boundaries import Boundaries, even_groups, layer_wise
from gradwire.planning.collectives import Transfer, time_of
from gradwire.planning.costs import BackwardTiming, CodecCost, Line, Link, Network
from gradwire.planning.merge import GroupCost, optimal_boundaries, search_boundaries, seconds_of
from gradwire.planning.merge_worker import moved_boundaries, worker_boundaries
from gradwire.recipes.mergecomp import dearer
from gradwire.unit.context import ExchangeContext
from gradwire_lab.bench.statistics import mixed, paired
from gradwire_lab.workloads.profile import backward_of

CODECS: dict[str, Callable[[], Codec]] = {
    "truncate": lambda: upper_bits(16),
    "efsignsgd": lambda: sign(None),
    "qsgd": lambda: qsgd_codec(8),
    "topk": lambda: sparse(top_k(0.01)),
}
SIZES = tuple(2**power for power in range(8, 21, 2))
NETWORKS = ("resnet50", "resnet101", "vgg19", "bert_base", "mask_rcnn")
LARGEST = "resnet101"  # 314 tensors
FEW = 13  # tensors that brute force can group in all 2^12 ways
ALONE = "one group"


def fitted(sizes: tuple[int, ...], seconds: list[float]) -> Line:
    """B + γ·x with the least relative errors; neither below 0."""
    x, y = np.array(sizes, float), np.array(seconds)
    design = np.stack([1 / y, x / y], axis=1)
    base, slope = np.linalg.lstsq(design, np.ones_like(y), rcond=None)[0]
    if base < 0:
        return Line(0.0, float((y * x).sum() / (x * x).sum()))
    return Line(float(base), max(float(slope), 0.0))


def measured(codec: Codec, repetitions: int) -> CodecCost:
    """Seconds of `take` and of `add_decoded`, for fresh numbers each time."""
    encode, decode = [], []
    for size in SIZES:
        taken, added = [], []
        for number in range(repetitions + 1):
            x, out, ctx = torch.randn(size), torch.zeros(size), ExchangeContext(number, 0, 0, 1)
            start_s = time.perf_counter()
            payload = codec.take(x, ctx)
            middle_s = time.perf_counter()
            codec.add_decoded(payload, out, 1.0, ctx)
            taken.append(middle_s - start_s)
            added.append(time.perf_counter() - middle_s)
        encode.append(median(taken[1:]))
        decode.append(median(added[1:]))
    return CodecCost(fitted(SIZES, encode), fitted(SIZES, decode))


def payload_bytes(codec: Codec) -> float:
    """Bytes per element of a large unit."""
    numel, dtype = codec.payload(1 << 20, torch.float32, ExchangeContext(0, 0, 0, 1))
    return numel * dtype.itemsize / (1 << 20)


def group_cost(cost: CodecCost, per_element: float, network: Network, world: int) -> GroupCost:
    """All-gather of payloads: every rank decodes all of them."""
    latency = time_of(Transfer("all_gather", 0.0), world, network)
    slope = time_of(Transfer("all_gather", per_element), world, network) - latency
    decode = Line(world * cost.decode.base_s, world * cost.decode.slope_s)
    return GroupCost(cost.encode, Line(latency, slope), decode)


def joined(of: BackwardTiming, tensors: int) -> BackwardTiming:
    """Neighbours joined until only `tensors` are left, for which brute force can try everything."""
    groups = list(pairwise((0, *even_groups(len(of.numel), tensors), len(of.numel))))
    ready = tuple(of.ready_s[stop - 1] for _first, stop in groups)
    return BackwardTiming(of.before_s, ready, tuple(sum(of.numel[a:b]) for a, b in groups), of.total_s)


def ways(of: BackwardTiming, cost: GroupCost) -> dict[str, Boundaries]:
    """Every planner's grouping."""
    tensors, seconds = len(of.numel), seconds_of(of, cost, beside=False)
    return {
        "layer-wise": layer_wise(tensors),
        ALONE: (),
        **{f"even {parts}": even_groups(tensors, parts) for parts in (2, 3, 4)},
        "Algorithm 2, Y=2": search_boundaries(seconds, tensors, 2),
        "exact": optimal_boundaries(of, cost),
        "worker": worker_boundaries(of, cost),
    }


def brute_force(seconds: Callable[[Boundaries], float], tensors: int) -> float:
    """The least of all groupings."""
    every = (
        boundaries for number in range(tensors) for boundaries in combinations(range(1, tensors), number)
    )
    return min(map(seconds, every))


def compared(of: BackwardTiming, cost: GroupCost) -> dict[str, Any]:
    """Seconds of every way under both models, and by how much the plans miss brute force on fewer tensors."""
    found, few = ways(of, cost), joined(of, FEW)
    inside, beside = (seconds_of(of, cost, beside=each) for each in (False, True))
    few_inside, few_beside = (seconds_of(few, cost, beside=each) for each in (False, True))
    least, least_beside = (brute_force(each, len(few.numel)) for each in (few_inside, few_beside))
    return {
        "groups": {name: len(boundaries) + 1 for name, boundaries in found.items()},
        "inline_s": {name: inside(boundaries) for name, boundaries in found.items()},
        "worker_s": {name: beside(boundaries) for name, boundaries in found.items()},
        "worker_searched_s": beside(worker_boundaries(of, cost, effort=100_000)),
        "inline_to_brute_force": few_inside(optimal_boundaries(few, cost)) / least,
        "worker_to_brute_force": few_beside(worker_boundaries(few, cost)) / least_beside,
    }


def line(network: str, codec: str, row: dict[str, Any]) -> str:
    """A network and a codec as text: seconds over the exact plan's, and over the reducer's."""
    names = list(row["inline_s"])
    inside = "".join(f"{row['inline_s'][name] / row['inline_s']['exact']:>7.3f}" for name in names)
    beside = "".join(f"{row['worker_s'][name] / row['worker_s']['worker']:>7.3f}" for name in names)
    groups = f"{row['groups']['exact']:>4}{row['groups']['worker']:>4}"
    checks = f"{row['inline_to_brute_force']:>8.4f}{row['worker_to_brute_force']:>8.4f}"
    return f"{network:<11}{codec:<10} │{inside} │{beside} │{groups} │{checks}"


def both_plans(of: BackwardTiming, cost: GroupCost) -> Any:
    """What `mergecomp` plans by default."""
    return moved_boundaries(of, dearer(cost), worker_boundaries(of, cost))


def planning(costs: dict[str, GroupCost], repetitions: int) -> list[dict[str, Any]]:
    """Milliseconds of planning 314 tensors, every time other ones."""
    base, rows = backward_of(shapes.load(LARGEST)), []
    planners: dict[str, Callable[[BackwardTiming, GroupCost], Any]] = {
        "exact": optimal_boundaries,
        "recipe": both_plans,
    }
    for codec, cost in costs.items():
        spent: dict[str, list[float]] = {}
        wall: dict[str, list[float]] = {}
        for number in range(repetitions):
            draw = Random(number)
            steps = [draw.random() for _ in base.numel]
            ready = tuple(base.total_s * at / sum(steps) for at in accumulate(steps))
            of = BackwardTiming(base.before_s, ready, base.numel, ready[-1])
            for name, planner in mixed([*planners.items(), ("exact again", optimal_boundaries)], number):
                wall_s, start_s = time.perf_counter(), time.thread_time()
                planner(of, cost)
                spent.setdefault(name, []).append(1e3 * (time.thread_time() - start_s))
                wall.setdefault(name, []).append(1e3 * (time.perf_counter() - wall_s))
        again = paired(spent["exact again"], spent["exact"])
        row = {"codec": codec, "tensors": len(base.numel), "ms": spent, "wall_ms": wall}
        row["aa"] = [again.low, again.high]
        text = f"{codec:<12}{median(spent['exact']):>8.2f}{max(spent['exact']):>9.2f}"
        text += f"{median(spent['recipe']):>9.2f}{f'{again.low:.2f} … {again.high:.2f}':>15}"
        print(text, flush=True)
        rows.append(row)
    return rows


def all_costs(arguments: argparse.Namespace) -> dict[str, tuple[CodecCost, float]]:
    """Codec costs and bytes per element, from the file or measured now."""
    if arguments.costs:
        read = json.loads(arguments.costs.read_text())
        return {
            name: (CodecCost(Line(*entry["encode"]), Line(*entry["decode"])), entry["bytes"])
            for name, entry in read.items()
        }
    prepare(imported())
    return {
        name: (measured(make(), arguments.repetitions), payload_bytes(make()))
        for name, make in CODECS.items()
    }


def verdicts(rows: list[dict[str, Any]], times: list[dict[str, Any]]) -> None:
    """Whether the goals are met."""
    worst = max(max(row["inline_to_brute_force"], row["worker_to_brute_force"]) for row in rows)
    print(
        f"goal: at most 1.02 of the optimum (brute force): {worst:.4f},", "met" if worst <= 1.02 else "missed"
    )
    searched = max(row["worker_s"]["worker"] / row["worker_searched_s"] for row in rows)
    print(f"at full size, over a search 25 times as long: {searched:.4f}")
    never = all(
        row[model][ours] <= min(row[model].values()) * (1 + 1e-9)
        for row in rows
        for model, ours in (("inline_s", "exact"), ("worker_s", "worker"))
    )
    print("goal: never worse than any other:", "met" if never else "missed")
    slowest = max(median(row["ms"]["exact"]) for row in times)
    print(f"goal: 314 tensors in at most 10 ms: {slowest:.2f} ms,", "met" if slowest <= 10 else "missed")
    print(f"stretch: 3 ms: {slowest:.2f} ms,", "met" if slowest <= 3 else "missed")
    default = max(median(row["ms"]["recipe"]) for row in times)
    print(f"all that mergecomp plans by default: {default:.2f} ms")


def main() -> None:
    """Measure, plan, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e9, help="bit/s of a link")
    parser.add_argument("--latency", type=float, default=1e-4, help="seconds of a hop")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--costs", type=Path, help="measured lines instead: {codec: {encode, decode, bytes}}")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    network = Network(Link(arguments.latency, 8 / arguments.rate))
    found = all_costs(arguments)
    print("codec       encode µs + ns/element   decode µs + ns/element   bytes/element")
    for name, (cost, per_element) in found.items():
        ends = (cost.encode, cost.decode)
        lines = "".join(f"{1e6 * at.base_s:>13.1f}{1e9 * at.slope_s:>12.3f}" for at in ends)
        print(f"{name:<10}{lines}{per_element:>14.3f}")
    costs = {name: group_cost(*entry, network, arguments.world) for name, entry in found.items()}
    names = ("layers", "one", "even2", "even3", "even4", "Alg2", "exact", "worker")
    head = "".join(f"{name:>7}" for name in names)
    print("\nseconds over those of the model's own plan: the codec inside the backward pass, beside it;")
    print(f"groups of both plans; both over brute force on few tensors\n{'':<21} │{head} │{head} │")
    rows = []
    for name in NETWORKS:
        of = backward_of(shapes.load(name))
        for codec, cost in costs.items():
            rows.append({"network": name, "tensors": len(of.numel), "codec": codec, **compared(of, cost)})
            print(line(name, codec, rows[-1]), flush=True)
    print(f"\n{'planning, ms':<12}{'exact':>8}{'worst':>9}{'recipe':>9}{'A/A':>15}")
    times = planning(costs, max(arguments.repetitions, 7))
    verdicts(rows, times)
    if arguments.json:
        lines = {
            name: {
                "encode": [cost.encode.base_s, cost.encode.slope_s],
                "decode": [cost.decode.base_s, cost.decode.slope_s],
                "bytes": per_element,
            }
            for name, (cost, per_element) in found.items()
        }
        options = {"world": arguments.world, "rate": arguments.rate, "latency": arguments.latency}
        document = {**options, "costs": lines, "rows": rows, "planning": times}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
