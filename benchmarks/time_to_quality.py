"""Does `auto` train as well as plain DDP in as many steps, and how much sooner?

Settings × entries × seeds on an emulated link. All entries of a seed are alive at once and take turns, in
slices of steps and in another order each time; DDP runs twice (`ddp`, `ddp again`), which is the A/A spread.
A line of JSON per setting and seed is added to the file, and a call that was interrupted goes on after the
last line.

The table tells, per setting and entry: the median step after `auto` has settled; the final loss (of the last
tenth of the steps) and the figure on held-out data, as differences from DDP's, paired by seed; seconds until
the loss first is as low as DDP's after a half, three quarters and all of its steps, over DDP's own; and what
`auto` took.

    python benchmarks/time_to_quality.py FILE.jsonl [--settings demo chargpt-4] [--seeds 0 1 2] [--table]
        [--entries ddp "ddp again" gcomp …]
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from gradwire_lab import emulate
from gradwire_lab.bench.measurement import Setting
from gradwire_lab.bench.process_set import prepare_workers
from gradwire_lab.bench.settings import BenchEntry, TrainingTask, parse_entry
from gradwire_lab.bench.statistics import StepSample, mixed, slowest

SLICE = 20
"""Steps after which another entry has its turn."""
WINDOW = 10
"""Steps over which a loss is averaged before it counts as reached."""
SHARES = (0.5, 0.75, 1.0)
"""Of DDP's steps, after which it has the losses that all others are to reach."""
AGAIN = "ddp again"
PEERS = ("ddp", AGAIN)
RECIPES = ("auto", "int8", "int4", "acpsgd(rank=4)")
"""What `auto` may take, and what it took when it asked for speed alone."""
HOOKS = ("fp16_hook", *(f"powersgd_hook(rank={rank}, bucket_cap_mb=1000)" for rank in (1, 2, 4)))


@dataclass(frozen=True)
class Case:
    """A workload on so many ranks, over a link of each rank, for so many steps."""

    workload: str
    workers: int
    rate: str
    steps: int
    bucket_cap_mb: float | None = None
    decays: bool = False

    @property
    def task(self) -> TrainingTask:
        """The training that all entries share."""
        return TrainingTask(
            self.workload,
            bucket_cap_mb=self.bucket_cap_mb,
            decay_steps=self.steps if self.decays else None,
        )


CASES = {
    # The demonstration's link and steps depend on the machine; these are the ones of README's run.
    "demo": Case("resnet_demo", 2, "23mbit", 240, bucket_cap_mb=0.1, decays=True),
    "convnet-4": Case("convnet", 4, "200mbit", 400),
    "convnet-4-100mbit": Case("convnet", 4, "100mbit", 300),
    "chargpt-2": Case("chargpt", 2, "200mbit", 120),
    "chargpt-4": Case("chargpt", 4, "200mbit", 120),
}


def entry_of(name: str) -> BenchEntry:
    """A peer by the name of one of torch's, and else a recipe."""
    peer = name.startswith("ddp") or "_hook" in name
    return parse_entry("ddp" if name == AGAIN else name, "peer" if peer else "recipe")


def run(case: Case, names: Sequence[str], seed: int, mode: str) -> dict[str, Any]:
    """Train all entries from one seed; what each of them did, by name."""
    link = emulate.EmulatedLink(emulate.parse_rate(case.rate), 0.0)
    found: dict[str, dict[str, Any]] = {}
    with emulate.EmulatedNetwork(case.workers, link, mode) as network, ExitStack() as stack:
        running: dict[str, Setting] = {}
        for name in names:
            running[name] = Setting(entry_of(name), case.task, network, case.workers, 180.0)
            stack.callback(running[name].end)
        for name, setting in running.items():
            setting.greet()
            setting.setup(seed)
            found[name] = {"step_s": [], "loss": [], "settled_at": 0}
        for number, done in enumerate(range(0, case.steps, SLICE)):
            for name in mixed(list(names), number):
                per_rank = running[name].train(min(SLICE, case.steps - done))
                _add(found[name], running[name], per_rank)
        for name, setting in running.items():
            setting.check()
            found[name] |= _ended(setting)
    return found


def _add(line: dict[str, Any], setting: Setting, per_rank: list[list[StepSample]]) -> None:
    if not per_rank:
        return
    line["step_s"] += [round(each, 5) for each in slowest(per_rank)]
    losses = [[sample.loss for sample in samples] for samples in zip(*per_rank, strict=True)]
    line["loss"] += [None if None in each else round(fmean(each), 5) for each in losses]
    if not setting.settled:
        line["settled_at"] = len(line["step_s"])


def _ended(setting: Setting) -> dict[str, Any]:
    measured = setting.measured
    report = measured.report or {}
    told = ("recipe", "late", "why", "choices", "wire_bytes")
    return {
        "evaluation": dict(setting.evaluate()),
        "identical": len(set(measured.fingerprints)) == 1 if measured.fingerprints else None,
        "sent_bytes_per_step": fmean(measured.sent_bytes) if measured.sent_bytes else None,
        "failed": None if measured.failure is None else measured.failure.reason,
        "report": {name: report.get(name) for name in told} if report else None,
    }


def record(path: Path, cases: Sequence[str], names: Sequence[str], seeds: Sequence[int], mode: str) -> None:
    """Run what is not there yet, all settings of one seed before the next."""
    done = {(line["setting"], line["seed"]) for line in read(path)}
    for seed in seeds:
        for case in cases:
            if (case, seed) in done:
                continue
            line = {"setting": case, "seed": seed, "entries": run(CASES[case], names, seed, mode)}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(table([line]), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """All lines so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def final_loss(line: dict[str, Any]) -> float:
    """Mean of the last tenth of the steps; not a number where one of them has none."""
    return loss_after(line, 1.0)


def loss_after(line: dict[str, Any], share: float) -> float:
    """Mean of a tenth of the steps before this share of them has passed."""
    losses = line["loss"]
    end = round(share * len(losses))
    last = losses[max(0, end - max(1, len(losses) // 10)) : end]
    return float("nan") if not last or None in last else fmean(last)


def mean_of(lines: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """A line with the means over these, step by step; `None` where one has none."""
    return {
        what: [
            None if None in each else fmean(each)
            for each in zip(*(line[what] for line in lines), strict=True)
        ]
        for what in ("step_s", "loss")
    }


def seconds_to(line: dict[str, Any], loss: float) -> float:
    """Training time until the mean of `WINDOW` losses is at most `loss`; infinite where it never is."""
    passed_s, losses = 0.0, line["loss"]
    for number, step_s in enumerate(line["step_s"], start=1):
        passed_s += step_s
        recent = losses[max(0, number - WINDOW) : number]
        if number >= WINDOW and None not in recent and fmean(recent) <= loss:
            return passed_s
    return float("inf")


def figure(line: dict[str, Any]) -> float:
    """On held-out data: accuracy in per cent, or the loss where there is none."""
    evaluation = line["evaluation"]
    accuracy = evaluation.get("test_accuracy")
    if not evaluation:
        return float("nan")
    return evaluation["test_loss"] if accuracy is None else 100 * accuracy


def apart(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Mean difference, paired, with its standard error."""
    each = [one - other for one, other in zip(ours, theirs, strict=True)]
    error = f" ± {stdev(each) / len(each) ** 0.5:.4f}" if len(each) > 1 else ""
    return f"{fmean(each):+.4f}{error}"


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Rows per setting and entry."""
    by_setting: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_setting.setdefault(line["setting"], []).append(line["entries"])
    shown = [
        "| setting | entry | seeds | step, ms | MB a step | loss beside DDP's | held out beside DDP's | "
        f"time to DDP's loss after {', '.join(f'{share:.0%}' for share in SHARES)} of the steps | ran |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, seeds in by_setting.items():
        settled = max(max(entries.get("auto", {}).get("settled_at", 0), SLICE) for entries in seeds)
        for name in seeds[0]:
            of = [(entries[name], entries["ddp"]) for entries in seeds if not entries[name]["failed"]]
            if not of:
                shown.append(f"| {setting} | `{name}` | failed: {seeds[0][name]['failed']} |")
                continue
            step_ms = fmean(1e3 * median(ours["step_s"][settled:] or ours["step_s"]) for ours, _ in of)
            sent = [ours["sent_bytes_per_step"] for ours, _ in of]
            sent_mb = "" if None in sent else f"{fmean(sent) / 1e6:.2f}"
            loss = apart([final_loss(ours) for ours, _ in of], [final_loss(ddp) for _, ddp in of])
            held_out = apart([figure(ours) for ours, _ in of], [figure(ddp) for _, ddp in of])
            ratios = [
                fmean(
                    seconds_to(ours, loss_after(ddp, share)) / seconds_to(ddp, loss_after(ddp, share))
                    for ours, ddp in of
                )
                for share in SHARES
            ]
            ran = sorted({(ours["report"] or {}).get("recipe") or "" for ours, _ in of})
            shown.append(
                f"| {setting} | `{name}` | {len(of)} | {step_ms:.1f} | {sent_mb} | {loss} | {held_out} | "
                f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} | {', '.join(ran)} |"
            )
    return "\n".join(shown)


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--settings", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--entries", nargs="+", default=[*PEERS, *RECIPES])
    parser.add_argument("--hooks", action="store_true", help="torch's compressing hooks, too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="only show the file")
    options = parser.parse_args()
    if not options.table:
        mode = emulate.enter("auto")
        prepare_workers()
        names = [*options.entries, *(HOOKS if options.hooks else ())]
        record(options.file, options.settings, names, options.seeds, mode)
    print(table(read(options.file)))


if __name__ == "__main__":
    main()
