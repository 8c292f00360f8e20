"""Does `auto` choose well? Settings × {DDP, `auto`, fixed recipes}, alternating, on an emulated network.

Each setting is one `gradwire bench`; a line of JSON per setting is added to the file, and a call that was
interrupted goes on after the last line. The table tells:

- regret: `auto`'s step over that of the best fixed recipe, or DDP, that keeps at least as much;
- DDP: the paired ratio of `auto`'s step to DDP's, with its 95 % interval (beside the spread of the bound
  against itself);
- predicted: what `auto` said a step would take, over what it took;
- hook: the step of torch's PowerSGD hook over that of our recipe of the same rank.

A third of the settings are held back: choose nothing by what they show. `--held-back` runs them alone,
`--tuning` the others.

    python benchmarks/sweep.py sweep.jsonl [--tuning | --held-back] [--only chargpt-4]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gradwire.control.choice import LATE
from gradwire.recipes.auto import CANDIDATES

FIXED = (
    "fp16",
    "int8",
    "int4",
    "topk(ratio=0.01, values='fp16')",
    "leader_topk(ratio=0.01, values='fp16')",
    "powersgd(rank=2)",
    "powersgd(rank=8)",
    "covap(interval=3)",
)
"""Timed beside `auto`; what each keeps is as `auto` found it, or else as it usually is."""

HOOK = "powersgd_hook(rank=2, bucket_cap_mb=1000)"
"""Torch's own, of the same rank as one of ours."""


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


SETTINGS = (
    Setting("resnet18", 2, "200mbit", "0"),
    Setting("chargpt", 4, "200mbit", "0"),
    Setting("chargpt", 2, "100mbit", "10ms"),
    Setting("convnet", 3, "50mbit", "2ms"),
    Setting("chargpt", 2, "unlimited", "0"),
    Setting("convnet", 2, "1gbit", "5ms"),
    Setting("emulated(vgg19, shrink=16)", 4, "500mbit", "0"),
    Setting("emulated(bert_base, shrink=16)", 2, "200mbit", "5ms"),
    Setting("resnet18", 3, "500mbit", "5ms", held_back=True),
    Setting("emulated(gpt2, shrink=32)", 8, "200mbit", "0", held_back=True),
    Setting("emulated(resnet101, shrink=16)", 4, "200mbit", "0", held_back=True, nodes=2),
    Setting("convnet", 4, "unlimited", "20ms", held_back=True),
    Setting("convnet", 4, "100mbit", "0", held_back=True),
    Setting("convnet", 2, "50mbit", "20ms", held_back=True),
    Setting("chargpt", 3, "500mbit", "0", held_back=True),
    Setting("chargpt", 2, "500mbit", "5ms", held_back=True),
    Setting("emulated(vgg19, shrink=32)", 2, "1gbit", "0", held_back=True),
    Setting("emulated(resnet101, shrink=16)", 3, "1gbit", "5ms", held_back=True),
    Setting("emulated(bert_base, shrink=32)", 3, "100mbit", "0", held_back=True),
    Setting("emulated(gpt2, shrink=32)", 2, "50mbit", "20ms", held_back=True),
)


def bench(setting: Setting, steps: int, rounds: int) -> dict[str, Any]:
    """The document of one `gradwire bench`."""
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "document.json"
        command = [str(Path(sys.executable).with_name("gradwire")), "bench"]
        command += ["--workload", setting.workload, "--workers", str(setting.workers)]
        command += ["--rate", setting.rate, "--delay", setting.delay, "--peers", f"ddp;{HOOK}"]
        command += ["--nodes", str(setting.nodes)] if setting.nodes else []
        command += ["--recipes", ";".join(("auto", *FIXED)), "--json", str(document)]
        command += ["--steps", str(steps), "--rounds", str(rounds)]
        # A recipe that fails makes the exit code 1, and is a line of the document.
        subprocess.run(command, check=False)
        found: dict[str, Any] = json.loads(document.read_text())
        return found


def summary(setting: Setting, document: dict[str, Any]) -> dict[str, Any]:
    """A line of the file."""
    rows = {row["name"]: row for row in document["rows"]}
    auto, report = rows["auto"], rows["auto"]["report"] or {}
    ratio = auto["speedup_over_ddp"] or {}
    return {
        "setting": setting.name,
        "held_back": setting.held_back,
        "chosen": report.get("recipe"),
        "why": report.get("why"),
        "choices": report.get("choices") or [],
        "predicted_step_s": report.get("predicted_step_s"),
        "step_s": {name: row["step_s"] for name, row in rows.items()},
        "loss": {name: row["loss"] for name, row in rows.items()},
        "failed": {name: row["failed"] for name, row in rows.items() if row["failed"]},
        # Of speeds, so that the upper bound of one is the lower bound of the other.
        "auto_over_ddp": {key: 1 / ratio[key] for key in ("ratio", "low", "high")} if ratio else None,
        "spread": document["spread"],
        "machine": document["machine"],
    }


@dataclass(frozen=True)
class Judged:
    """What a line says; `None` where `auto` or DDP failed."""

    regret: float
    best: str
    over_ddp: float
    low: float
    predicted: float
    hook: float | None
    chose_dense: bool
    dense_was_right: bool


def judged(line: dict[str, Any]) -> Judged | None:
    """Regret against what leaves no more of the gradient late, and whether dense was the right answer."""
    steps_s = line["step_s"]
    if not steps_s.get("auto") or not steps_s.get("ddp") or line["auto_over_ddp"] is None:
        return None
    table = {row["recipe"]: row["late"] for row in line["choices"] if row["late"] is not None}
    running = [row["recipe"] for row in line["choices"] if row["verdict"] == "runs"]
    chosen = running[0] if running else "dense"
    late = {"ddp": 0.0} | {text: table.get(text, CANDIDATES[text]) for text in FIXED if steps_s.get(text)}
    most = max(table.get(chosen, 0.0), LATE)
    rivals = [text for text in late if late[text] <= most]
    best = min(rivals, key=lambda text: steps_s[text])
    able = [text for text in late if text != "ddp" and late[text] <= LATE]
    faster = min((steps_s[text] for text in able), default=steps_s["ddp"])
    return Judged(
        regret=steps_s["auto"] / steps_s[best],
        best=best,
        over_ddp=line["auto_over_ddp"]["ratio"],
        low=line["auto_over_ddp"]["high"],
        predicted=(line["predicted_step_s"] or 0.0) / steps_s["auto"],
        hook=_over(steps_s.get(HOOK), steps_s.get("powersgd(rank=2)")),
        chose_dense=chosen == "dense",
        dense_was_right=faster > 0.95 * steps_s["ddp"],
    )


def _over(theirs_s: float | None, ours_s: float | None) -> float | None:
    return theirs_s / ours_s if theirs_s and ours_s else None


def table(lines: Iterable[dict[str, Any]]) -> str:
    """One row per setting, and what all of them say together."""
    shown = [
        f"{'setting':<28} {'chosen':<40} {'regret':>6} {'DDP':>6} {'≥':>6} {'predicted':>9} {'hook':>6}  best"
    ]
    found: list[Judged] = []
    for line in lines:
        verdict = judged(line)
        mark = "*" if line["held_back"] else ""
        if verdict is None:
            shown.append(f"{line['setting'] + mark:<28} failed: {line['failed']}")
            continue
        found.append(verdict)
        hook = "" if verdict.hook is None else f"{verdict.hook:.2f}"
        shown.append(
            f"{line['setting'] + mark:<28} {(line['chosen'] or '')[:40]:<40} {verdict.regret:>6.2f} "
            f"{verdict.over_ddp:>6.2f} {verdict.low:>6.2f} {verdict.predicted:>9.2f} {hook:>6}  "
            f"{verdict.best}"
        )
    if found:
        regrets = [each.regret for each in found]
        errors = [abs(each.predicted - 1.0) for each in found]
        right = sum(each.chose_dense == each.dense_was_right for each in found)
        shown += [
            "* held back",
            f"regret {fmean(regrets):.3f} in the mean, {max(regrets):.3f} at worst (goal: 1.05, 1.15)",
            f"over DDP: the largest lower bound is {max(each.low for each in found):.3f} (goal: 1.02)",
            f"prediction error {fmean(errors):.1%} in the mean, {max(errors):.1%} at worst (goal: 5 %, 15 %)",
            f"dense or not was right in {right} of {len(found)} settings",
        ]
    return "\n".join(shown)


def main() -> None:
    """Run what is not in the file yet, and print the table of all that is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tuning", action="store_true")
    which.add_argument("--held-back", action="store_true")
    parser.add_argument("--only", help="settings whose name contains this")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    lines = []
    if options.file.exists():
        lines = [json.loads(line) for line in options.file.read_text().splitlines()]
    done = {line["setting"] for line in lines}
    for setting in SETTINGS:
        skipped = (options.tuning and setting.held_back) or (options.held_back and not setting.held_back)
        if skipped or setting.name in done or (options.only or "") not in setting.name:
            continue
        document = bench(setting, options.steps, options.rounds)
        lines.append(summary(setting, document))
        with options.file.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
