"""What does `auto` cost where plain DDP is fast enough? Time of 100 steps over the loopback, beside DDP's.

Contestants train from the same seed: plain DDP twice, which is the A/A spread, `dense`, and `auto`. All are
alive at once and take turns, in slices of steps and in another order each time, from the first step on: what
`auto` measures first counts. With `--src` the source of another tree, such as that of the commit before,
runs `dense` and `auto` beside them.

The table tells, per workload and contestant, as the median over seeds and their range: seconds of all steps,
of the slowest rank; these over plain DDP's, and over `dense`'s of the same tree (the price of deciding); the
median step of the last half; and what ran, and the step after which it had been decided. The first call
on a machine compiles kernels, which no step counts.

    python -m benchmarks.fast_link [--src OTHER/src] [--workloads chargpt convnet] [--seeds 0 1 2]
        [--steps 100] [--json PATH]
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
OURS = HERE.parent.parent / "src"
SLICE = 10
"""Steps after which another contestant has its turn."""
MARK = "@ "
"""Begins the lines of a rank that are answers."""


class Contestant(NamedTuple):
    """What trains, by whose source; `beside` is the contestant that runs `dense` by the same source."""

    name: str
    entry: str
    kind: str
    source: Path
    beside: str | None = None


def contestants(other: Path | None) -> list[Contestant]:
    """Those that take turns."""
    found = [
        Contestant("ddp", "ddp", "peer", OURS),
        Contestant("ddp again", "ddp", "peer", OURS),
        Contestant("dense", "dense", "recipe", OURS),
        Contestant("auto", "auto", "recipe", OURS, "dense"),
    ]
    if other is not None:
        found += [
            Contestant("dense, other tree", "dense", "recipe", other),
            Contestant("auto, other tree", "auto", "recipe", other, "dense, other tree"),
        ]
    return found


class Ranks:
    """The processes of a contestant, which run `program`. They answer a line of JSON with one."""

    def __init__(self, contestant: Contestant, workers: int, program: Path = HERE) -> None:
        self.contestant = contestant
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        variables = {
            "GRADWIRE_COMPILE_FIRST": "1",  # what is timed is compiled
            **os.environ,
            "PYTHONPATH": str(contestant.source),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(workers),
        }
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(program), "--serve"],
                env={**variables, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(workers)
        ]

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """The answers of all ranks; ends the program where one has died."""
        for process in self._processes:
            assert process.stdin is not None, "a pipe"
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None, "a pipe"
        for line in process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        raise SystemExit(f"a rank of {self.contestant.name} has ended with {process.wait()}")

    def end(self) -> None:
        """Let the processes go, which end with their input."""
        for process in self._processes:
            assert process.stdin is not None, "a pipe"
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                process.kill()


def serve() -> None:
    """One rank: builds and trains what it is told."""
    import torch
    import torch.distributed as dist

    from gradwire_lab.bench.settings import TrainingTask, parse_entry
    from gradwire_lab.bench.trainer import Trainer, build

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer: Trainer | None = None
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if "workload" in command:
            trainer = None  # the old model goes first
            entry = parse_entry(command["entry"], command["kind"])
            trainer = build(entry, TrainingTask(command["workload"]), command["seed"])
        elif trainer is not None:
            samples = [trainer.step() for _ in range(command["steps"])]
            report = trainer.report() or {}
            answer = {
                "step_s": [sample.step_s for sample in samples],
                "settled": [sample.settled for sample in samples],
                "recipe": report.get("recipe"),
                "why": report.get("why"),
                "fingerprint": trainer.fingerprint(),
            }
        print(MARK + json.dumps(answer), flush=True)
    dist.destroy_process_group()


@contextmanager
def started(some: Sequence[Contestant], workers: int) -> Iterator[dict[str, Ranks]]:
    """The processes of all contestants."""
    with ExitStack() as stack:
        running = {}
        for each in some:
            running[each.name] = Ranks(each, workers)
            stack.callback(running[each.name].end)
        yield running


def trained(running: Mapping[str, Ranks], workload: str, seed: int, steps: int) -> dict[str, dict[str, Any]]:
    """All contestants from one seed, in turns: by name their steps, and what ran in the end."""
    from gradwire_lab.bench.statistics import mixed

    found: dict[str, dict[str, Any]] = {}
    for name, ranks in running.items():
        each = ranks.contestant
        ranks.ask(workload=workload, seed=seed, entry=each.entry, kind=each.kind)
        found[name] = {"step_s": [], "settled": []}
    for number, done in enumerate(range(0, steps, SLICE)):
        for name in mixed(list(running), number):
            answers = running[name].ask(steps=min(SLICE, steps - done))
            line = found[name]
            line["step_s"] += [max(each) for each in zip(*(each["step_s"] for each in answers), strict=True)]
            line["settled"] += answers[0]["settled"]
            line |= {"recipe": answers[0]["recipe"], "why": answers[0]["why"]}
            line["identical"] = len({each["fingerprint"] for each in answers}) == 1
    return found


def text_of(values: Sequence[float], digits: int) -> str:
    """Median and range.

    >>> text_of([1.0, 3.0, 2.0], 1)
    '2.0 (1.0 to 3.0)'
    """
    low, middle, high = (f"{each:.{digits}f}" for each in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"


def table(some: Sequence[Contestant], workload: str, seeds: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """The rows of a workload."""
    shown = []
    for each in some:
        lines = [found[each.name] for found in seeds]
        total_s = [sum(line["step_s"]) for line in lines]
        beside = ["" if name is None else _over(seeds, each.name, name) for name in ("ddp", each.beside)]
        last_ms = [1e3 * median(line["step_s"][len(line["step_s"]) // 2 :]) for line in lines]
        after = [line["settled"].index(True) + 1 if True in line["settled"] else None for line in lines]
        ran = "; ".join(sorted({str(line["recipe"]) for line in lines}))
        if each.entry == "auto":
            ran += f", after {', '.join(map(str, after))}"
        columns = [workload, f"`{each.name}`", text_of(total_s, 2), *beside, text_of(last_ms, 1)]
        shown.append(f"| {' | '.join(columns)} | {'' if each.kind == 'peer' else ran} |")
        if not all(line["identical"] for line in lines):
            raise SystemExit(f"{each.name}: replicas differ")
    return "\n".join(shown)


def _over(seeds: Sequence[Mapping[str, Mapping[str, Any]]], one: str, other: str) -> str:
    return text_of([sum(found[one]["step_s"]) / sum(found[other]["step_s"]) for found in seeds], 3)


def main() -> None:
    """Measure, and print the table as it grows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--src", type=Path, help="the source of another tree, such as ../before/src")
    parser.add_argument("--workloads", nargs="+", default=["chargpt", "convnet"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.src is not None and not (options.src / "gradwire").is_dir():
        parser.error(f"there is no gradwire in {options.src}")
    some = contestants(None if options.src is None else options.src.resolve())
    found: dict[str, list[dict[str, dict[str, Any]]]] = {each: [] for each in options.workloads}
    begun_s = time.monotonic()
    with started(some, options.workers) as running:
        for seed in options.seeds:
            for workload in options.workloads:
                found[workload].append(trained(running, workload, seed, options.steps))
                print(
                    f"seed {seed}: {workload}, {time.monotonic() - begun_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    print(
        f"| workload | contestant | s of {options.steps} steps | over DDP | over `dense` | step, ms | ran |"
    )
    print("|---|---|---|---|---|---|---|")
    for workload, seeds in found.items():
        print(table(some, workload, seeds))
    if options.json is not None:
        options.json.write_text(json.dumps({"options": vars(options), "found": found}, default=str) + "\n")


if __name__ == "__main__":
    main()
