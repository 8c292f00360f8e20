"""Is the advice of `gradwire advise` true: do measured speed-ups lie in the ranges that it gives?

Twelve emulated settings: three models over four links each, one of them not slowed, on two to four ranks. In
each, plain DDP is watched, and then a trace of the same training is recorded on all ranks. After that, what
was advised runs beside plain DDP, in blocks of steps that take turns on the same link. Plain DDP runs twice:
its second time says by how much steps differ where nothing does (A/A). `int8` and `int4` always run: where
nothing is advised, `int8` may not be faster by more than the model's error.

`HELD_OUT` names the settings that nobody looks at while the constants of `gradwire.advise` are chosen. A file
of results keeps what was observed, so that a corrected model is judged by what is measured already.

    python benchmarks/advise.py --part open --json advise.json       # about 8 minutes on two cores
    python benchmarks/advise.py --part held-out --json advise.json   # about 12; settings that are there stay
    python benchmarks/advise.py --again --json advise.json           # measures nothing
    python benchmarks/advise.py --read rank-0.json.gz …              # traces of others, such as NCCL_TRACES
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradwire_lab import emulate

SETTINGS = (
    "chargpt:none:0:2",
    "chargpt:100mbit:0:2",
    "chargpt:400mbit:0:3",
    "chargpt:400mbit:5ms:4",
    "convnet:none:0:3",
    "convnet:10mbit:0:4",
    "convnet:30mbit:0:2",
    "convnet:30mbit:5ms:3",
    "resnet18:none:0:2",
    "resnet18:500mbit:0:2",
    "resnet18:500mbit:2ms:2",
    "resnet18:1gbit:0:3",
)
"""Model, rate, one-way delay, ranks. Gradients have 9.6, 0.35 and 45 MB."""

HELD_OUT = (
    *(each for each in SETTINGS if each.startswith("resnet18:")),
    "chargpt:400mbit:5ms:4",
    "convnet:10mbit:0:4",
)

PARTS = {
    "open": tuple(each for each in SETTINGS if each not in HELD_OUT),
    "held-out": HELD_OUT,
    "all": SETTINGS,
}

BATCH = {"resnet18": 4}
"""Samples of a rank in a step, where a model's own number takes a core more than a second."""

NCCL_TRACES = (
    "tests/data/nccl_parser_config/nccl_data.json.gz",
    "tests/data/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "tests/data/trace_filter/sampled_rank-0.json.gz",
    "tests/data/trace_filter/sampled_rank-1.json.gz",
)
"""Of facebookresearch/HolisticTraceAnalysis, under the MIT licence. Named before any of them was read."""

SOURCES = ("watched", "traced")
ALWAYS = ("int8", "int4")

WATCHED, SETTLING, TRACED = 12, 3, 8
WARMING, BLOCK, FEWEST, MOST, ROUNDS_S = 8, 4, 6, 15, 60.0
"""Steps of each way before it counts, steps of a block, and rounds of blocks: as many as take so long."""

TIGHT, SLOWER, FASTER = 1.4, 1.03, 1.15
"""The upper end of a range over its lower, at most; how much slower what is advised may be; and how much
faster what is not."""

LONGEST_S = 600.0


def stepper(workload: str, recipe: str | None = None) -> Any:
    """A function that makes one step of a new model, with a recipe or without."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gradwire
    from gradwire_lab.workloads.catalogue import workload as named

    work = named(workload, full=False, batch_size=BATCH.get(workload))
    model = DistributedDataParallel(work.model(0))
    optimizer = work.optimizer(model.parameters())
    wire = None if recipe is None else gradwire.attach(model, optimizer, recipe)
    batches = work.batches(dist.get_rank(), dist.get_world_size(), 0)

    def step() -> Any:
        optimizer.zero_grad()
        work.loss(model, next(batches)).backward()
        optimizer.step()
        return wire

    return step


def observe(workload: str, folder: Path) -> None:
    """A rank that trains with plain DDP, is watched, and records its last steps."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from gradwire.advise.observed import Observed
    from gradwire.advise.watch import ENOUGH, DDPWatch

    def finished(observed: Observed | None) -> None:
        if observed is not None:
            (folder / "watched.json").write_text(json.dumps(asdict(observed)), encoding="utf-8")

    assert WATCHED >= ENOUGH
    with DDPWatch(WATCHED, finished) as watch:
        step = stepper(workload)
        while not watch.is_over:
            step()
    for _ in range(SETTLING):
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(TRACED):
            step()
    recorded.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))


def compare(workload: str, folder: Path, recipes: list[str], rounds: int) -> None:
    """A rank on which plain DDP, the same again, the same while it is watched, and recipes take turns.

    Rank 0 writes how long a step took in each block.
    """
    import torch.distributed as dist

    from gradwire.advise.watch import DDPWatch
    from gradwire_lab.bench.statistics import mixed

    watch = DDPWatch(10**9, print)  # which is never over
    plain = stepper(workload)
    ways = {"plain": plain, "again": plain} | {recipe: stepper(workload, recipe) for recipe in recipes}
    with watch:
        ways["watched"] = stepper(workload)
    took_s: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-WARMING // BLOCK, rounds):
        for name in mixed(list(ways), number):
            dist.barrier()
            with watch if name == "watched" else nullcontext():
                began_s = time.perf_counter()
                for _ in range(BLOCK):
                    ways[name]()
            if number >= 0:
                took_s[name].append((time.perf_counter() - began_s) / BLOCK)
    if dist.get_rank() == 0:
        (folder / "compared.json").write_text(json.dumps(took_s), encoding="utf-8")


def rank(arguments: argparse.Namespace) -> None:
    """A process of the emulated network."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(emulate.backend())
    torch.set_num_threads(1)
    if arguments.rounds:
        compare(arguments.rank, arguments.folder, arguments.recipes, arguments.rounds)
    else:
        observe(arguments.rank, arguments.folder)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo may hang when its connections are freed


def ranks(network: emulate.EmulatedNetwork, *words: str) -> None:
    """Run this file on all ranks."""
    started: list[subprocess.Popen[Any]] = [
        network.popen(each, [sys.executable, __file__, *words], stdout=subprocess.DEVNULL)
        for each in range(network.workers)
    ]
    codes = [each.wait(timeout=LONGEST_S) for each in started]
    if any(codes):
        raise RuntimeError(f"{words}: ranks ended with {codes}")


def measure(setting: str, codecs: Mapping[str, Any]) -> dict[str, Any]:
    """One setting, all of it on one network: what was observed, and seconds of a step by way and block."""
    from gradwire.advise.traces import read

    workload, rate, delay, workers = setting.split(":")
    bit_per_s = None if rate == "none" else emulate.parse_rate(rate)
    link = emulate.EmulatedLink(bit_per_s, emulate.parse_delay(delay))
    mode = emulate.enter("auto")
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, emulate.EmulatedNetwork(int(workers), link, mode) as network:
        folder = Path(name)
        words = ["--rank", workload, "--folder", name]
        ranks(network, *words)
        observed = {
            "watched": json.loads((folder / "watched.json").read_text()),
            "traced": asdict(read(sorted(folder.glob("rank*.json.gz")))),
        }
        found = [recipe_of(advice(each, codecs)) for each in observed.values()]
        recipes = [each for each in dict.fromkeys((*found, *ALWAYS)) if each]
        step_s = restored(observed["watched"]).most(lambda step: step.step_s)
        rounds = min(max(int(ROUNDS_S / (BLOCK * step_s * (2 + 0.5 * len(recipes)))), FEWEST), MOST)
        ranks(network, *words, "--rounds", str(rounds), "--recipes", *recipes)
        took_s = json.loads((folder / "compared.json").read_text())
    return {"observed": observed, "took_s": took_s, "all_s": time.perf_counter() - began_s}


def restored(told: Mapping[str, Any]) -> Any:
    """An `Observed` from its numbers."""
    from gradwire.advise.observed import Observed, ObservedStep, RankSteps, ReadyOrder

    each = dict(told)
    each["ranks"] = tuple(
        RankSteps(rank["rank"], tuple(ObservedStep(**step) for step in rank["steps"]))
        for rank in told["ranks"]
    )
    if told["gradients"] is not None:
        shapes = tuple(map(tuple, told["gradients"]["shapes"]))
        each["gradients"] = ReadyOrder(**{**told["gradients"], "shapes": shapes})
    return Observed(**{**each, "timed": tuple(map(tuple, told["timed"]))})


def advice(observed: Mapping[str, Any], codecs: Mapping[str, Any]) -> dict[str, Any]:
    """The advice of today's model on what was observed."""
    from gradwire.advise.answer import advise
    from gradwire.planning.costs import CodecCost, Line

    costs = {text: CodecCost(Line(*each[0]), Line(*each[1])) for text, each in codecs.items()}
    return advise(restored(observed), codecs=costs).as_dict()


def costs_of_codecs() -> dict[str, Any]:
    """What encoding and decoding cost here on one thread, by recipe: two lines each."""
    import torch

    from gradwire._api.plan import CANDIDATES
    from gradwire.measure.codec import measure_codec
    from gradwire.recipes.parse import steady

    torch.set_num_threads(1)
    costs = {text: measure_codec(steady(text, "candidate").exchange).cost for text in CANDIDATES}
    return {
        text: [[each.encode.base_s, each.encode.slope_s], [each.decode.base_s, each.decode.slope_s]]
        for text, each in costs.items()
    }


def recipe_of(said: Mapping[str, Any]) -> str:
    """The mildest recipe that should be about as fast as the fastest; empty where nothing would help."""
    from gradwire.planning.choice import LEAD

    most = max((gain["times"] for gain in said["would_help"]), default=0.0)
    about = (gain["change"] for gain in said["would_help"] if gain["times"] >= (1.0 - LEAD) * most)
    return next(about, "")


def judged(result: Mapping[str, Any], source: str, codecs: Mapping[str, Any]) -> dict[str, Any]:
    """Whether what one source says is so. Where nothing is advised, `int8` may not be faster."""
    from gradwire_lab.bench.statistics import paired

    said, took_s = advice(result["observed"][source], codecs), result["took_s"]
    recipe = recipe_of(said)
    gain = next((each for each in said["would_help"] if each["change"] == recipe), None)
    low, high = (gain["low"], gain["high"]) if gain else (0.0, FASTER)
    row = {"advised": recipe or "nothing", "bound": said["bound"], "low": low, "high": high}
    row |= {"exposed_s": said["exposed_s"], "is_tight": gain is None or high <= TIGHT * low}
    if (recipe or "int8") not in took_s:
        return {**row, "measured": None, "is_in_range": False, "is_slower": False}
    found, same = (paired(took_s["plain"], took_s[name]) for name in (recipe or "int8", "again"))
    return {
        **row,
        "measured": found,
        "is_in_range": low <= found.ratio <= high,
        "is_slower": bool(recipe) and found.high < min(1.0 / SLOWER, same.low),
    }


def table(results: Mapping[str, Any], codecs: Mapping[str, Any]) -> None:
    """Print all results, as today's model sees them."""
    from gradwire_lab.bench.statistics import paired

    print("| setting | source | bound by | advised | range | measured | in it | A/A | exposed, ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows: dict[str, list[dict[str, Any]]] = {source: [] for source in SOURCES}
    for setting, result in results.items():
        held = " (held out)" * (setting in HELD_OUT)
        same = paired(result["took_s"]["plain"], result["took_s"]["again"])
        for source in SOURCES:
            row = judged(result, source, codecs)
            rows[source].append(row)
            found = row["measured"]
            times = f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})" if found else "not measured"
            marks = ("yes" if row["is_in_range"] else "no") + ", slower" * row["is_slower"]
            limits = f"{row['low']:.2f} to {row['high']:.2f}"
            shown = f"{row['bound']} | {row['advised']} | {limits} | {times} | {marks}"
            exposed_ms = 1e3 * row["exposed_s"]
            print(f"| {setting}{held} | {source} | {shown} | {same.ratio:.3f} | {exposed_ms:.1f} |")
    for source, found in rows.items():
        print(f"\n{source}, of {len(found)}:", end="")
        for name in ("is_in_range", "is_tight", "is_slower"):
            print(f" {name.replace('_', ' ')} {sum(row[name] for row in found)}", end=";")
        fast = [row["advised"] for row, name in zip(found, results, strict=True) if ":none:" in name]
        print(f" nothing advised on {fast.count('nothing')} of {len(fast)} links that are not slowed")
    pairs = list(zip(*rows.values(), strict=True))
    shares = [traced["exposed_s"] / max(watched["exposed_s"], 1e-9) for watched, traced in pairs]
    print(f"exposed by traces over watched: {', '.join(f'{share:.3f}' for share in shares)}")
    took = [each["took_s"] for each in results.values()]
    shares = [paired(each["watched"], each["plain"]).ratio for each in took]
    print(f"a watched step over a plain one: {', '.join(f'{share:.3f}' for share in shares)}")
    for setting, each in zip(results, took, strict=True):
        ways = [name for name in each if name not in ("plain", "again", "watched")]
        print(setting, *(f"{name} {paired(each['plain'], each[name]).ratio:.2f}" for name in ways), sep="; ")


def main() -> None:
    """Measure what is not measured yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, default="all")
    parser.add_argument("--settings", nargs="+", help="instead of a part")
    parser.add_argument(
        "--json", type=Path, help="results; settings that are in there are not measured again"
    )
    parser.add_argument("--again", action="store_true", help="judge what is in the file, and measure nothing")
    parser.add_argument("--read", nargs="+", type=Path, help="read traces, and measure nothing")
    for name, kind in (("--rank", str), ("--folder", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--recipes", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options)
        return
    if options.read:
        from gradwire.advise.answer import advise
        from gradwire.advise.traces import read

        print(advise(read(options.read)))
        return
    if not options.again:
        emulate.enter("auto")  # from here on inside of a sandbox
    path: Path | None = options.json
    found = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
    found.setdefault("results", {})
    if "codecs" not in found and not options.again:
        found["codecs"] = costs_of_codecs()
    for setting in () if options.again else options.settings or PARTS[options.part]:
        if setting in found["results"]:
            continue
        found["results"][setting] = measure(setting, found["codecs"])
        print(f"{setting}: measured in {found['results'][setting]['all_s']:.0f} s", flush=True)
        if path is not None:
            path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    table(found["results"], found["codecs"])


if __name__ == "__main__":
    main()
