"""Is the advice of `gradwire advise` true: do measured speed-ups lie in the ranges that it prints?

Twelve emulated settings: three models over four links, one of them not slowed, on two to four ranks. In each,
plain DDP is watched, and a trace of the same training is recorded on all ranks. Then the recipe that was
advised runs beside plain DDP, in blocks of steps that take turns on the same link. Where nothing was
advised, `int8` runs instead: it may not be faster by more than the trace's or the watched run's error.

`HELD_OUT` names the settings that nobody looked at while the constants of `gradwire.advise` were chosen.

    python benchmarks/advise.py [--settings chargpt:100mbit:0:2 …] [--blocks 8] [--json PATH]
    python benchmarks/advise.py --read rank-0.json.gz …     # traces of others, such as NCCL_TRACES
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gradwire.lab import emulate

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

NCCL_TRACES = (
    "tests/data/nccl_parser_config/nccl_data.json.gz",
    "tests/data/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "tests/data/trace_filter/sampled_rank-0.json.gz",
    "tests/data/trace_filter/sampled_rank-1.json.gz",
)
"""Of facebookresearch/HolisticTraceAnalysis, under the MIT licence. Named before any of them was read."""

WARMING, BLOCK, TRACED = 12, 6, 8
TIGHT = 1.4
"""The upper end of a range over its lower, at most."""
SLOWER = 1.03


@dataclass(frozen=True)
class Result:
    """One setting: what was advised by each source, and how many times as fast it was."""

    setting: str
    watched: dict[str, Any]
    traced: dict[str, Any]
    measured: dict[str, dict[str, float]]


def train(workload: str, arguments: argparse.Namespace) -> None:
    """A rank that trains with plain DDP, and records its last steps if it is asked to."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    dist.init_process_group(emulate.backend())
    torch.set_num_threads(1)
    step = stepper(workload)[0]
    for _ in range(arguments.steps):
        step()
    if arguments.trace is not None:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            for _ in range(TRACED):
                step()
        recorded.export_chrome_trace(str(arguments.trace / f"rank{dist.get_rank()}.json.gz"))
    dist.barrier()
    dist.destroy_process_group()


def stepper(workload: str, recipe: str | None = None) -> tuple[Any, Any]:
    """A function that makes one step of a new model, with a recipe or without, and what owns its state."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gradwire
    from gradwire.lab.workloads.catalogue import workload as named

    work = named(workload, full=False)
    model = DistributedDataParallel(work.model(0))
    optimizer = work.optimizer(model.parameters())
    wire = None if recipe is None else gradwire.attach(model, optimizer, recipe)
    batches = work.batches(dist.get_rank(), dist.get_world_size(), 0)

    def step() -> None:
        optimizer.zero_grad()
        work.loss(model, next(batches)).backward()
        optimizer.step()

    return step, (model, wire)


def compare(workload: str, arguments: argparse.Namespace) -> None:
    """A rank on which plain DDP, the same while it is watched, and a recipe take turns.

    Rank 0 writes how long blocks of steps took.
    """
    import torch
    import torch.distributed as dist

    from gradwire.advise.watch import Watch

    dist.init_process_group(emulate.backend())
    torch.set_num_threads(1)
    watch = Watch(10**9, print)  # which is never over
    ways = {"plain": stepper(workload), "advised": stepper(workload, arguments.compare)}
    with watch:
        ways["watched"] = stepper(workload)
    took_s: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(arguments.blocks + 2):
        for name, (step, _) in ways.items():
            dist.barrier()
            with watch if name == "watched" else nullcontext():
                began_s = time.perf_counter()
                for _ in range(BLOCK):
                    step()
            if block >= 2:  # buckets are rebuilt, kernels are compiled
                took_s[name].append((time.perf_counter() - began_s) / BLOCK)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(took_s), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def ranks(network: emulate.EmulatedNetwork, *words: str) -> None:
    """Run a command of Python on all ranks."""
    started: list[subprocess.Popen[Any]] = [
        network.popen(rank, [sys.executable, *words], stdout=subprocess.DEVNULL)
        for rank in range(network.workers)
    ]
    codes = [each.wait() for each in started]
    if any(codes):
        raise RuntimeError(f"{words}: ranks ended with {codes}")


def measure(setting: str, blocks: int) -> Result:
    """One setting, all of it on one network."""
    workload, rate, delay, workers = setting.split(":")
    link = emulate.EmulatedLink(
        None if rate == "none" else emulate.parse_rate(rate), emulate.parse_delay(delay)
    )
    mode = emulate.enter("auto")
    with tempfile.TemporaryDirectory() as name, emulate.EmulatedNetwork(int(workers), link, mode) as network:
        folder = Path(name)
        advice = ["-m", "gradwire", "advise", "--codec", "measured", "--json"]
        script = [__file__, "--train", workload]
        ranks(
            network,
            *advice,
            str(folder / "watched.json"),
            "--stop",
            script[0],
            "--",
            *script[1:],
            "--steps",
            "60",
        )
        ranks(network, *script, "--steps", str(WARMING), "--trace", name)
        traces = sorted(map(str, folder.glob("rank*.json.gz")))
        command = [sys.executable, *advice, str(folder / "traced.json"), *traces]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        said = {each: json.loads((folder / f"{each}.json").read_text()) for each in ("watched", "traced")}
        measured = {}
        for recipe in dict.fromkeys(advised(each) or "int8" for each in said.values()):
            out = folder / "compared.json"
            ranks(network, *script, "--compare", recipe, "--blocks", str(blocks), "--out", str(out))
            measured[recipe] = speed_up(json.loads(out.read_text()))
    return Result(setting, said["watched"], said["traced"], measured)


def advised(said: dict[str, Any]) -> str:
    """The recipe of the line to write; empty where there is none."""
    return str(said["write"].split('"')[1]) if said["write"] else ""


def speed_up(took_s: dict[str, list[float]]) -> dict[str, float]:
    """How many times as fast the advised steps were, in the median of blocks side by side, and the spread."""
    pairs = [plain / other for plain, other in zip(took_s["plain"], took_s["advised"], strict=True)]
    watched = [other / plain for plain, other in zip(took_s["plain"], took_s["watched"], strict=True)]
    plain_s = median(took_s["plain"])
    found = {"times": median(pairs), "low": min(pairs), "high": max(pairs)}
    return {**found, "plain_s": plain_s, "watching": median(watched)}


def judged(result: Result, source: str) -> dict[str, Any]:
    """Whether what one source said is so."""
    said = getattr(result, source)
    recipe = advised(said)
    found = result.measured[recipe or "int8"]
    gain = next((each for each in said["would_help"] if each["change"] == recipe), None)
    low, high = (gain["low"], gain["high"]) if gain else (0.0, 1.15)
    return {
        "advised": recipe or "nothing",
        "bound": said["bound"],
        "low": low,
        "high": high,
        "measured": found["times"],
        "is_in_range": low <= found["times"] <= high,
        "is_tight": gain is None or high <= TIGHT * low,
        "is_slower": bool(recipe) and found["times"] < 1.0 / SLOWER and found["high"] < 1.0,
        "exposed_s": said["exposed_s"],
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", nargs="+", type=Path, help="read traces, and measure nothing")
    for name in ("--train", "--compare"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=60, help=argparse.SUPPRESS)
    for name in ("--trace", "--out"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        (compare if options.compare else train)(options.train, options)
        return
    if options.read:
        from gradwire.advise.answer import advise
        from gradwire.advise.traces import read

        print(advise(read(options.read)))
        return
    sources, results = ("watched", "traced"), []
    print("| setting | source | bound by | advised | range | measured | in it | exposed, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for setting in options.settings:
        results.append(measure(setting, options.blocks))
        held = " (held out)" * (setting in HELD_OUT)
        for source in sources:
            row = judged(results[-1], source)
            found = f"{row['low']:.2f} to {row['high']:.2f} | {row['measured']:.2f}"
            marks = ("yes" if row["is_in_range"] else "no") + ", slower" * row["is_slower"]
            shown = f"{row['bound']} | {row['advised']} | {found} | {marks} | {1e3 * row['exposed_s']:.1f}"
            print(f"| {setting}{held} | {source} | {shown} |", flush=True)
    for source in sources:
        rows = [judged(each, source) for each in results]
        print(f"\n{source}, of {len(rows)}:", end="")
        for name in ("is_in_range", "is_tight", "is_slower"):
            print(f" {name.replace('_', ' ')} {sum(row[name] for row in rows)}", end=";")
        fast = [row["advised"] for row, each in zip(rows, results, strict=True) if ":none:" in each.setting]
        print(f" nothing advised on {fast.count('nothing')} of {len(fast)} links that are not slowed")
    exposed = [each.traced["exposed_s"] / max(each.watched["exposed_s"], 1e-9) for each in results]
    print(f"exposed by traces over watched: {', '.join(f'{share:.2f}' for share in exposed)}")
    watching = [found["watching"] for each in results for found in each.measured.values()]
    print(f"a watched step over a plain one: {', '.join(f'{share:.3f}' for share in watching)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
