"""How soon does gradwire notice that the link has changed, and what does watching it cost?

Ranks of an emulated network train an emulated model under a lossy recipe; while they run, the launcher gives
the link another rate or delay, and back. Nothing is sent for it: the step's own collectives tell. Printed are
the steps until the change was noticed (all ranks agree: checked), what was seen, and how long watching takes
per step. A run over which nothing changes stands at the end and must report nothing. With `--recipe flexible`
or `auto`, what ran is printed, with the step from which on, for the changed link and for the one after it.

Goal: within 20 steps, at 1 % of a step or less.

    python benchmarks/link_change.py [--workers 4] [--steps 40] [--recipe int8] [--json PATH]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.measure.link import LinkMonitor, Sample
from gradwire_lab import emulate
from gradwire_lab.workloads.catalogue import workload

START = emulate.EmulatedLink(200e6, 0.001)
CHANGES = {
    "half the rate": emulate.EmulatedLink(100e6, 0.001),
    "three quarters of the rate": emulate.EmulatedLink(150e6, 0.001),
    "twice the rate": emulate.EmulatedLink(400e6, 0.001),
    "five times the delay": emulate.EmulatedLink(200e6, 0.005),
    "both": emulate.EmulatedLink(50e6, 0.01),
    "nothing": START,
}
WORKLOAD = "emulated(vgg19, shrink=64, time_scale=0.25)"


def worker(recipe: str) -> None:
    """One rank: for every line on stdin so many steps; answers with what was noticed in them."""
    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    made = workload(WORKLOAD)
    ddp = DistributedDataParallel(made.model(0), gradient_as_bucket_view=True)
    wire = gradwire.attach(ddp, recipe=recipe)
    batches = made.batches(dist.get_rank(), dist.get_world_size(), 0)
    for line in sys.stdin:
        first, taken_s, ran = wire.report().step, [], list[tuple[int, str]]()
        for _ in range(int(line)):
            start_s = time.perf_counter()
            made.loss(ddp, next(batches)).backward()
            taken_s.append(time.perf_counter() - start_s)
            if not ran or ran[-1][1] != wire.report().recipe:
                ran.append((len(taken_s), wire.report().recipe))
        report = wire.report()
        noticed = [(step - first + 1, change) for step, change in report.link_changes if step >= first]
        seen = [(number, change.before, change.after) for number, change in noticed]
        answer = {
            "noticed": [(n, b.alpha_s, b.beta_s, a.alpha_s, a.beta_s) for n, b, a in seen],
            "step_s": median(taken_s),
            "ran": ran,
        }
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


def cost_of_watching_s(steps: int = 2000) -> float:
    """Seconds per step of the two samples that a step gives, on this machine."""
    monitor = LinkMonitor(4)
    start_s = time.perf_counter()
    for _ in range(steps):
        monitor.observe([Sample("all_reduce", 1e3, 0.004), Sample("all_reduce", 9e6, 0.5)])
    return (time.perf_counter() - start_s) / steps


def ask(ranks: "list[subprocess.Popen[str]]", steps: int) -> dict[str, Any]:
    """Let all ranks run so many steps; what they say, which must be the same."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(f"{steps}\n")
        rank.stdin.flush()
    answers = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]
    assert len({json.dumps(answer["noticed"]) for answer in answers}) == 1, "ranks differ"
    first: dict[str, Any] = answers[0]
    return first


def line(name: str, answer: dict[str, Any], share: float) -> str:
    """One change as text."""
    text = f"{name:<28}{answer['step_s']:>8.3f}{share:>10.3%}"
    if not answer["noticed"]:
        return f"{text}{'never':>9}"
    number, *link = answer["noticed"][0]
    before, after = (f"{a * 1e3:.2f} ms {8e-6 / b:.0f} Mbit/s" for a, b in (link[:2], link[2:]))
    return f"{text}{number:>9}   {before} → {after}" + "  (and again)" * (len(answer["noticed"]) > 1)


def main() -> None:
    """Build the network, start the ranks, change the link under them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="per phase")
    parser.add_argument("--recipe", default="int8")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments.recipe)
        return
    entered, found = emulate.enter(), {}
    watching_s = cost_of_watching_s()
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with emulate.EmulatedNetwork(arguments.workers, START, entered) as network:
        command = [sys.executable, __file__, "--recipe", arguments.recipe]
        ranks = [network.popen(rank, command, **pipes) for rank in range(arguments.workers)]
        ask(ranks, arguments.steps)
        print(f"{'change':<28}{'step s':>8}{'watching':>10}{'noticed':>9}   what was seen", flush=True)
        for name, link in CHANGES.items():
            network.reshape(link)
            found[name] = ask(ranks, arguments.steps)
            found[name]["watching_share"] = watching_s / found[name]["step_s"]
            print(line(name, found[name], found[name]["watching_share"]), flush=True)
            network.reshape(START)
            back = ask(ranks, arguments.steps)
            if len({text for _, text in (*found[name]["ran"], *back["ran"])}) > 1:
                print(f"  ran {found[name]['ran']}, and back {back['ran']}", flush=True)
    late = [answer["noticed"][0][0] if answer["noticed"] else 10**6 for answer in found.values()]
    worst = max(late[:-1])
    is_quiet = not found["nothing"]["noticed"]
    print(f"goal: within 20 steps: {worst},", "met" if worst <= 20 and is_quiet else "missed")
    share = max(answer["watching_share"] for answer in found.values())
    print(f"goal: at 1 % of a step: {share:.3%},", "met" if share <= 0.01 else "missed")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
