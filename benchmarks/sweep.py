"""Does `auto` choose well, and does training lose by it? Many settings, on an emulated network.

A setting is a workload on some ranks over a link. In each:

- a race from seed 0: the step without communication (`bound`), plain DDP twice (`ddp`, `ddp again`), `auto`,
  and casts and few bits, which are within `auto`'s limit or, as `int4`, just above it. All are alive at
  once. Once `auto` has settled they take turns, in slices of steps and in another order each time;
- where the model is a real one, `auto` trains from two more seeds. Its final losses stand beside DDP's from
  the same seeds, which no link changes: DDP trains once per workload, number of ranks and seed, over a link
  without a limit.

A line of JSON per setting is added to the file, and a call that was interrupted goes on after the last line.
The table tells:

- the choice, the steps after which `auto` had settled, and the race: its step over that of the fastest
  recipe of the race within the limit, or of DDP (regret), and over DDP's, paired by slice, with a 95 %
  interval;
- A/A: the step of `ddp again` over DDP's;
- predicted: what `auto` said a step would take, over what it took;
- gap: `auto`'s final loss (mean of the last tenth of its steps) less DDP's, paired by seed, in units of DDP's
  standard deviation over seeds; negative is better;
- time: seconds of `auto`, measuring included, until the mean loss of its seeds first is the one with which
  the worst seed of DDP ends, over DDP's, which is its median step of the race times its number of steps until
  the mean of its seeds is there. Seed by seed, one of two equals misses the other's last loss as often as
  not.

Two thirds of the settings are held back: choose nothing by what they show.

    python -m benchmarks.sweep benchmarks/results/sweep.jsonl [--only chargpt-4] [--table]
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.time_to_quality import entry_of, final_loss, mean_of, read, seconds_to
from gradwire.planning.choice import LATE
from gradwire_lab import emulate
from gradwire_lab.bench.measurement import Setting as Running
from gradwire_lab.bench.process_set import prepare_workers
from gradwire_lab.bench.runner import machine
from gradwire_lab.bench.settings import BOUND, TrainingTask
from gradwire_lab.bench.statistics import mixed, paired, slowest

WITHIN = ("fp16", "int8", "int4(collective='all_gather')")
"""Raced beside `auto`. They leave up to about 0.12 steps' worth of gradient late; the limit is 0.15.
One that a trial found to leave more does not count as within it."""
FIXED = (*WITHIN, "int4")
"""And `int4`, which leaves 0.18: what the limit costs."""
PEERS = ("ddp", "ddp again")
SEEDS = (0, 1, 2)
SLICE = 12
SLICES = 4
SETTLING = 20
"""Steps after which it is asked whether `auto` has settled."""
STEPS = {"convnet": 200, "chargpt": 100, "resnet18": 100}
"""Of a training by workload; others have no loss."""
MOST_SETTLING = 120
"""Steps after which `auto` is raced as it is, where it has not settled."""


@dataclass(frozen=True)
class Setting:
    """A workload, a number of ranks, on nodes or not, and a link: of each rank, or of each node."""

    workload: str
    workers: int
    rate: str
    delay: str
    held_back: bool = False
    nodes: int | None = None

    @property
    def name(self) -> str:
        """Unique, short."""
        workload = self.workload.replace("emulated(", "").split(",")[0]
        on = f"-on-{self.nodes}" if self.nodes else ""
        return f"{workload}-{self.workers}{on}-{self.rate}-{self.delay}"

    @property
    def model(self) -> str:
        """Names the trainings that no link changes."""
        return f"{self.workload}-{self.workers}"


SETTINGS = (
    Setting("chargpt", 4, "200mbit", "0"),
    Setting("convnet", 3, "50mbit", "2ms"),
    Setting("chargpt", 2, "100mbit", "10ms"),
    Setting("convnet", 4, "100mbit", "0", held_back=True),
    Setting("emulated(vgg19, shrink=16)", 4, "500mbit", "0"),
    Setting("chargpt", 3, "500mbit", "0", held_back=True),
    Setting("convnet", 2, "50mbit", "20ms"),  # held back until the model let latencies pass side by side
    Setting("resnet18", 2, "200mbit", "0"),
    Setting("chargpt", 2, "unlimited", "0"),
    Setting("emulated(resnet101, shrink=16)", 4, "200mbit", "0", held_back=True, nodes=2),
    Setting("convnet", 2, "1gbit", "5ms"),
    Setting("emulated(bert_base, shrink=16)", 2, "200mbit", "5ms"),
    Setting("chargpt", 2, "500mbit", "5ms", held_back=True),
    Setting("convnet", 4, "unlimited", "20ms"),  # as the one above
    Setting("resnet18", 3, "500mbit", "5ms", held_back=True),
    Setting("emulated(gpt2, shrink=32)", 2, "50mbit", "20ms", held_back=True),
    Setting("emulated(resnet101, shrink=16)", 3, "1gbit", "5ms", held_back=True),
    Setting("emulated(bert_base, shrink=32)", 3, "100mbit", "0", held_back=True),
    Setting("emulated(vgg19, shrink=32)", 2, "1gbit", "0", held_back=True),
    Setting("emulated(gpt2, shrink=32)", 8, "200mbit", "0", held_back=True),
    # Later than the twenty above, and later than the rule.
    Setting("chargpt", 2, "50mbit", "0", held_back=True),
    Setting("convnet", 2, "20mbit", "0", held_back=True),
    Setting("chargpt", 4, "1gbit", "2ms", held_back=True, nodes=2),
    Setting("convnet", 3, "200mbit", "1ms", held_back=True),
    Setting("resnet18", 2, "1gbit", "1ms", held_back=True),
    Setting("emulated(vgg19, shrink=32)", 3, "300mbit", "2ms", held_back=True),
    Setting("emulated(bert_base, shrink=32)", 2, "500mbit", "10ms", held_back=True),
)


class Trainings:
    """Starts entries of one setting, and trains them in turns."""

    def __init__(self, setting: Setting, mode: str, stack: ExitStack) -> None:
        link = emulate.EmulatedLink(emulate.parse_rate(setting.rate), emulate.parse_delay(setting.delay))
        self._setting, self._stack = setting, stack
        self._network = stack.enter_context(
            emulate.EmulatedNetwork(setting.workers, link, mode, setting.nodes)
        )

    def start(self, names: Sequence[str], seed: int) -> dict[str, Running]:
        """All entries, set up from `seed`."""
        task, workers = TrainingTask(self._setting.workload), self._setting.workers
        running = {}
        for name in names:
            entry = BOUND if name == "bound" else entry_of(name)
            running[name] = Running(entry, task, self._network, workers, 180.0)
            self._stack.callback(running[name].end)
        for each in running.values():
            each.greet()
            each.setup(seed)
        return running


class Course:
    """A training: seconds and losses of its steps."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.line: dict[str, Any] = {"step_s": [], "loss": []}

    def go_on(self, steps: int) -> list[float]:
        """Train; seconds of these steps, of the slowest rank. None after a failure."""
        per_rank = self._running.train(steps) if steps > 0 else []
        losses = [[sample.loss for sample in samples] for samples in zip(*per_rank, strict=True)]
        self.line["loss"] += [None if None in each else round(fmean(each), 5) for each in losses]
        found = slowest(per_rank)
        self.line["step_s"] += [round(each, 5) for each in found]
        return found

    @property
    def steps(self) -> int:
        """Trained so far."""
        return len(self.line["step_s"])


def reference(setting: Setting, seed: int, mode: str) -> dict[str, Any]:
    """A line with DDP's losses from this seed, over a link without a limit."""
    free = Setting(setting.workload, setting.workers, "unlimited", "0")
    with ExitStack() as stack:
        course = Course(Trainings(free, mode, stack).start(["ddp"], seed)["ddp"])
        course.go_on(STEPS[setting.workload])
        return {"reference": setting.model, "seed": seed, **course.line}


def measure(setting: Setting, mode: str) -> dict[str, Any]:
    """The line of a setting."""
    total = STEPS.get(setting.workload, 0)
    names = ["bound", *PEERS, "auto", *FIXED]
    with ExitStack() as stack:
        trainings = Trainings(setting, mode, stack)
        running = trainings.start(names, SEEDS[0])
        courses = {name: Course(each) for name, each in running.items()}
        auto = courses["auto"]
        while running["auto"].alive and auto.steps < MOST_SETTLING:
            auto.go_on(SETTLING)
            if running["auto"].settled:
                break
        settled = running["auto"].settled
        settled_at = auto.steps
        slices: dict[str, list[float]] = {name: [] for name in names}
        for name in names:  # sockets, buckets and batches of what has not run yet
            if name != "auto":
                courses[name].go_on(SETTLING // 2)
        for number in range(SLICES):
            for name in mixed(names, number):
                found = courses[name].go_on(SLICE)
                slices[name] += [median(found)] if found else []
        auto.go_on(total - auto.steps)
        report = running["auto"].measured.report or {}
        choices = report.get("choices") or []
        line = {
            "setting": setting.name,
            "held_back": setting.held_back,
            "chosen": next((row["recipe"] for row in choices if row["verdict"] == "runs"), "dense"),
            "choices": choices,
            "predicted_step_s": report.get("predicted_step_s"),
            "settled_at": settled_at if settled else None,
            "slices_s": {name: [round(each, 6) for each in found] for name, found in slices.items()},
            "step_s": {name: median(found) if found else None for name, found in slices.items()},
            "failed": {
                name: each.measured.failure.reason
                for name, each in running.items()
                if each.measured.failure is not None
            },
            # As many steps as DDP's, whose loss goes on falling, and no more.
            "seeds": [{what: each[:total] for what, each in auto.line.items()}] if total else [],
            "machine": machine(),
        }
        for each in running.values():
            each.end()
        for seed in SEEDS[1:] if total else ():
            course = Course(trainings.start(["auto"], seed)["auto"])
            course.go_on(total)
            line["seeds"].append(course.line)
    return line


@dataclass(frozen=True)
class Judged:
    """What a line says. Without a real model `gaps` is empty and `time` None; where `auto` predicts nothing,
    because communication hides, `predicted` is None."""

    regret: float
    best: str
    over_ddp: float
    low: float
    again: float
    predicted: float | None
    settled_at: int | None
    gaps: tuple[float, ...]
    time: float | None


def judged(line: dict[str, Any], references: Sequence[dict[str, Any]]) -> Judged | None:
    """`None` where `auto` or DDP failed. `references` are DDP's trainings, by seed."""
    step_s, slices_s = line["step_s"], line["slices_s"]
    if not step_s.get("auto") or not step_s.get("ddp"):
        return None
    late = {row["recipe"]: row["late"] or 0.0 for row in line["choices"]}
    within = [name for name in WITHIN if late.get(name, 0.0) <= LATE]
    best = min((name for name in ("ddp", *within) if step_s[name]), key=lambda name: step_s[name])
    over_ddp = paired(slices_s["auto"], slices_s["ddp"])
    ends = [final_loss(each) for each in references]
    gaps: tuple[float, ...] = ()
    time = None
    if line["seeds"] and len(ends) == len(SEEDS):
        unit = stdev(ends)
        mine = [final_loss(each) for each in line["seeds"]]
        gaps = tuple((one - other) / unit for one, other in zip(mine, ends, strict=True))
        ddp = {**mean_of(references), "step_s": [step_s["ddp"]] * len(references[0]["loss"])}
        time = seconds_to(mean_of(line["seeds"]), max(ends)) / seconds_to(ddp, max(ends))
    return Judged(
        regret=step_s["auto"] / step_s[best],
        best=best,
        over_ddp=over_ddp.ratio,
        low=over_ddp.low,
        again=paired(slices_s["ddp again"], slices_s["ddp"]).ratio,
        predicted=line["predicted_step_s"] and line["predicted_step_s"] / step_s["auto"],
        settled_at=line["settled_at"],
        gaps=gaps,
        time=time,
    )


def table(lines: Iterable[dict[str, Any]]) -> str:
    """One row per setting, and what all of them say together."""
    lines = list(lines)
    of_model: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "reference" in line:
            of_model.setdefault(line["reference"], []).append(line)
    known = {each.name: each for each in SETTINGS}
    shown = [
        "| setting | chosen | settled after | bound, DDP, `auto`, ms | regret, beside | over DDP (A/A) | "
        "predicted | gap, by seed | time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    found: list[Judged] = []
    for line in lines:
        if "reference" in line:
            continue
        verdict = judged(line, of_model.get(known[line["setting"]].model, []))
        mark = " (held back)" if known[line["setting"]].held_back else ""
        if verdict is None:
            shown.append(f"| {line['setting']}{mark} | failed: {line['failed']} |")
            continue
        found.append(verdict)
        times = ", ".join(f"{1e3 * (line['step_s'][name] or 0.0):.1f}" for name in ("bound", "ddp", "auto"))
        gaps = ", ".join(f"{gap:+.2f}" for gap in verdict.gaps)
        shown.append(
            f"| {line['setting']}{mark} | `{line['chosen']}` | {verdict.settled_at or 'not settled'} "
            f"| {times} | {verdict.regret:.2f}, `{verdict.best}` "
            f"| {verdict.over_ddp:.2f} ({verdict.again:.2f}) "
            f"| {'' if verdict.predicted is None else f'{verdict.predicted:.2f}'} | {gaps} "
            f"| {'' if verdict.time is None else f'{verdict.time:.2f}'} |"
        )
    return "\n".join([*shown, "", *goals(found)]) if found else "\n".join(shown)


def goals(found: Sequence[Judged]) -> list[str]:
    """What all settings say together, beside what was wanted."""
    regrets = [each.regret for each in found]
    errors = [abs(each.predicted - 1.0) for each in found if each.predicted is not None]
    gaps = [fmean(each.gaps) for each in found if each.gaps]
    late = [each for each in found if each.settled_at is None or each.settled_at > 80]
    said = [
        f"- regret {fmean(regrets):.3f} in the mean, {max(regrets):.3f} at worst "
        "(goal: 1.05, 1.15 beyond A/A)",
        f"- over DDP: the largest lower bound is {max(each.low for each in found):.3f} (goal: 1.02)",
        f"- settled after more than 80 steps: {len(late)} of {len(found)} settings (goal: none)",
        f"- prediction error {fmean(errors):.1%} in the mean, {max(errors):.1%} at worst",
    ]
    if len(gaps) > 1:
        error = stdev(gaps) / len(gaps) ** 0.5
        said.append(
            f"- gap {fmean(gaps):+.2f} ± {error:.2f} of DDP's standard deviation over seeds, mean over "
            f"{len(gaps)} settings with its standard error (goal: at most 0.3)"
        )
    return said


def main() -> None:
    """Run what is not in the file yet, and print the table of all that is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--table", action="store_true", help="only show the file")
    options = parser.parse_args()
    if not options.table:
        mode = emulate.enter("auto")
        prepare_workers()
        record(options.file, [each for each in SETTINGS if options.only in each.name], mode)
    print(table(read(options.file)))


def record(path: Path, settings: Iterable[Setting], mode: str) -> None:
    """Add what is missing, setting by setting."""

    def add(line: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    for setting in settings:
        lines = read(path)
        if setting.name not in {line.get("setting") for line in lines}:
            add(measure(setting, mode))
        trained = {(line.get("reference"), line.get("seed")) for line in lines}
        for seed in SEEDS if setting.workload in STEPS else ():
            if (setting.model, seed) not in trained:
                add(reference(setting, seed, mode))
        print(table(read(path)), flush=True)


if __name__ == "__main__":
    main()
