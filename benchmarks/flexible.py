"""Does a ratio that follows the link pay, when latency and bandwidth change while training?

A small network trains on an emulated link that changes along the paper's schedules C1 and C2 (Tyagi and Swany
2024, section 3-E), bandwidths divided by 50 and latencies by 5, as much as two cores can carry: `flexible` by
default and as near to the paper as it comes (a knee, planned anew where the link changes), every static ratio
of AR-Topk and of an all-gather, and plain all-reduce, of each seed from the same weights on the same batches,
each in a run of its own. Printed are, in the mean over seeds, the sum of step times, over that of an oracle,
which runs the static setting that is fastest in each phase, whatever it keeps of the gradient, and the
accuracy on held-out data. Then the shares of steps by ratio and collective (the paper's figures 7 and 8), and
when each chose what; `--pictures` draws ratio and collective over steps, of the first seed.

    python benchmarks/flexible.py [--workers 4] [--steps 300] [--seeds 0 1 2] [--recipes flexible …]
        [--pictures FOLDER] [--json PATH]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from math import log10
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.planning.ratio import candidate_ratios
from gradwire_lab import emulate
from gradwire_lab.report import svg
from gradwire_lab.workloads.catalogue import workload

HIGH, LOW, MIDDLE = 500e6, 20e6, 200e6
SHORT, LONG, BETWEEN = 2e-4, 1e-2, 2e-3
SCHEDULES = {
    "C1": ((12, SHORT, HIGH), (12, SHORT, LOW), (12, LONG, LOW), (14, LONG, HIGH)),
    "C2": ((12, SHORT, HIGH), (8, BETWEEN, MIDDLE), (8, LONG, LOW), (8, BETWEEN, MIDDLE), (14, SHORT, HIGH)),
}
"""(epochs, latency in s, bandwidth in bit/s); 50 epochs altogether."""
EPOCHS = 50
FLEXIBLE = "flexible"
PAPERS = "flexible(rule='knee', trigger='link')"
ADAPTIVE = (FLEXIBLE, PAPERS)
RATIOS = tuple(round(ratio, 4) for ratio in candidate_ratios())
STATIC = (
    *(f"star_topk(ratio={ratio})" for ratio in RATIOS),
    *(f"mergecomp(inner='topk(ratio={ratio})', split='even', groups=1)" for ratio in RATIOS),
)
"""Both ways that `flexible` can take, in one unit like its own: a leader's choice in two rounds, and
everybody's own by all-gather."""
COLOURS = {"ring": "#3465a4", "tree": "#4e9a06", "all_gather": "#cc0000"}


def worker(recipe: str, name: str, seed: int) -> None:
    """One rank: so many steps per line on stdin; what they took, and what ran."""
    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    made = workload(name)
    ddp = DistributedDataParallel(made.model(seed), gradient_as_bucket_view=True)
    optimizer = made.optimizer(ddp.parameters())
    wire = gradwire.attach(ddp, optimizer, recipe)
    batches = made.batches(dist.get_rank(), dist.get_world_size(), seed)
    for line in sys.stdin:
        took_s, ran = [], []
        for _ in range(int(line)):
            batch = next(batches)
            dist.barrier()
            start_s = time.perf_counter()
            optimizer.zero_grad()
            made.loss(ddp, batch).backward()
            optimizer.step()
            took_s.append(time.perf_counter() - start_s)
            ran.append(wire.report().recipe)
        accuracy = made.evaluate(ddp.module).get("test_accuracy") if dist.get_rank() == 0 else None
        print(json.dumps({"took_s": took_s, "ran": ran, "accuracy": accuracy}), flush=True)
    dist.destroy_process_group()


def course(
    recipe: str, schedule: str, seed: int, arguments: argparse.Namespace, entered: Any
) -> dict[str, Any]:
    """One run along a schedule."""
    phases = SCHEDULES[schedule]
    start = emulate.EmulatedLink(phases[0][2], phases[0][1])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    found: dict[str, Any] = {"took_s": [], "ran": [], "phase_s": []}
    with emulate.EmulatedNetwork(arguments.workers, start, entered) as network:
        command = [sys.executable, __file__, "--recipe", recipe, "--workload", arguments.workload]
        command += ["--seeds", str(seed)]
        ranks = [network.popen(rank, command, **pipes) for rank in range(arguments.workers)]
        for epochs, latency_s, rate in phases:
            network.reshape(emulate.EmulatedLink(rate, latency_s))
            answers = ask(ranks, arguments.steps * epochs // EPOCHS)
            assert all(answer["ran"] == answers[0]["ran"] for answer in answers), "ranks ran different plans"
            slowest = [max(each) for each in zip(*(answer["took_s"] for answer in answers), strict=True)]
            found["took_s"] += slowest
            found["ran"] += answers[0]["ran"]
            found["phase_s"].append(sum(slowest))
            found["accuracy"] = answers[0]["accuracy"]
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.close()
            rank.wait(30)
    return found


def ask(ranks: "list[subprocess.Popen[str]]", steps: int) -> list[dict[str, Any]]:
    """Let all ranks run so many steps."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(f"{steps}\n")
        rank.stdin.flush()
    return [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]


def choices(ran: list[str]) -> list[tuple[int, float, str]]:
    """(first step, ratio, collective) of every plan that ran."""
    found: list[tuple[int, float, str]] = []
    for step, text in enumerate(ran):
        options = gradwire.recipe(text).options
        choice = (options.get("ratio", 0.1), options.get("way", "ring"))
        if not found or found[-1][1:] != choice:
            found.append((step, *choice))
    return found


STYLE = "<style>text{font:11px sans-serif;fill:#444}.grid{stroke:#ccc}polyline{fill:none}</style>"
WIDTH, HEIGHT, LEFT, TOP = 720.0, 260.0, 60.0, 24.0


def picture(schedule: str, ran: list[str]) -> str:
    """Ratio over steps, the colour being the collective; grey lines are where the link changes."""
    steps, plans = len(ran), choices(ran)
    right, bottom = WIDTH - 16, HEIGHT - 40

    def across(step: float) -> float:
        return LEFT + (right - LEFT) * step / steps

    def up(ratio: float) -> float:
        return bottom - (bottom - TOP) * (log10(ratio) + 3.2) / 2.4

    parts, done = [STYLE, '<rect width="100%" height="100%" fill="white"/>'], 0.0
    for epochs, latency_s, rate in SCHEDULES[schedule]:
        parts.append(svg.line(across(done), TOP, across(done), bottom, "grid"))
        words = f"{latency_s * 1e3:g} ms, {rate / 1e6:g} Mbit/s"
        parts.append(svg.text(across(done) + 4, TOP - 6, words))
        done += steps * epochs / EPOCHS
    parts += [svg.text(LEFT - 6, up(each) + 4, f"{each:.1%}", "end") for each in candidate_ratios()]
    ends = [step for step, *_ in plans[1:]] + [steps]
    for (step, ratio, way), end in zip(plans, ends, strict=True):
        points = f"{across(step):.1f},{up(ratio):.1f} {across(end):.1f},{up(ratio):.1f}"
        parts.append(svg.element("polyline", points=points, stroke=COLOURS[way], stroke_width=4))
    for place, (way, colour) in enumerate(COLOURS.items()):
        parts.append(svg.element("circle", cx=LEFT + 110 * place, cy=HEIGHT - 12, r=5, fill=colour))
        parts.append(svg.text(LEFT + 110 * place + 10, HEIGHT - 8, way))
    drawn = svg.drawing(WIDTH, HEIGHT, parts, f"ratio and collective over steps, {schedule}")
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


Run = dict[str, Any]


def table(schedule: str, runs: dict[str, list[Run]]) -> str:
    """One line per setting, means over seeds; and what the adaptive ones chose."""
    lines = [
        f"### {schedule}\n",
        "| setting | all steps, s | over the oracle's time | by phase, s | test accuracy, % |",
        "|---|---|---|---|---|",
    ]
    for recipe, found in runs.items():
        all_s = [sum(run["phase_s"]) for run in found]
        best_s = [oracle(runs, number) for number in range(len(found))]
        over = (
            spread([own / best for own, best in zip(all_s, best_s, strict=True)], 2) if all(best_s) else "-"
        )
        phases = zip(*(run["phase_s"] for run in found), strict=True)
        by_phase = " / ".join(f"{fmean(seconds):.1f}" for seconds in phases)
        accuracy = spread([100 * run["accuracy"] for run in found], 1)
        lines.append(f"| `{recipe}` | {spread(all_s, 1)} | {over} | {by_phase} | {accuracy} |")
    for recipe in [each for each in ADAPTIVE if each in runs]:
        lines += ["", f"`{recipe}`: shares of steps {shares(runs[recipe])}."]
        for number, run in enumerate(runs[recipe]):
            plans = "; ".join(f"{step}: {ratio:.2%} by {way}" for step, ratio, way in choices(run["ran"]))
            lines.append(f"Run {number}, from step on: {plans}")
    return "\n".join([*lines, ""])


def oracle(runs: dict[str, list[Run]], number: int) -> float:
    """Seconds of the best static setting in each phase, of one seed; 0 where there is none."""
    static = [found[number]["phase_s"] for recipe, found in runs.items() if recipe not in ADAPTIVE]
    return sum(min(each) for each in zip(*static, strict=True))


def shares(found: list[Run]) -> str:
    """Of all steps of all seeds, by ratio and by collective."""
    ran = [gradwire.recipe(text).options for run in found for text in run["ran"]]
    told = []
    for option, usual in (("ratio", 0.1), ("way", "ring")):
        counts = Counter(options.get(option, usual) for options in ran)
        told.append(", ".join(f"{value}: {count / len(ran):.0%}" for value, count in counts.most_common()))
    return "; ".join(told)


def spread(values: list[float], digits: int) -> str:
    """Mean ± standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error}"


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workload", default="convnet")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of weights and batches")
    parser.add_argument("--recipes", nargs="+", default=[*ADAPTIVE, *STATIC, "dense"])
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--recipe", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments.recipe, arguments.workload, arguments.seeds[0])
        return
    entered, found = emulate.enter(), {}
    for schedule in SCHEDULES:
        runs: dict[str, list[Run]] = {recipe: [] for recipe in arguments.recipes}
        for seed in arguments.seeds:
            for recipe, done in runs.items():
                done.append(course(recipe, schedule, seed, arguments, entered))
        print(table(schedule, runs), flush=True)
        if arguments.pictures and FLEXIBLE in runs:
            drawn = picture(schedule, runs[FLEXIBLE][0]["ran"])
            (arguments.pictures / f"flexible-{schedule.lower()}.svg").write_text(drawn)
        found[schedule] = runs
    if arguments.json:
        arguments.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
