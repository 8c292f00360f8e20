"""`make soak`: chaos from seed to seed for as long as you like, an endurance run, and a report of both."""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.soak.chaos import TIMEOUT_S, Outcome, carried_out
from tests.soak.endurance import BYTES_A_STEP, Samples, endured, grown, table
from tests.soak.plans import WORLD, drawn
from tests.support.ranks import ROOT

RESULTS = ROOT / "benchmarks" / "results"
MACHINE = f"""\
`python -m tests.soak`, {{machine}} with {{cores}} cores, torch {{torch}}, gloo, {WORLD} ranks. Other work may
have run beside it: times are upper ends.
"""
CHAOS = f"""\
## Chaos

{{seeds}} seeds of {{steps}} steps that count, {{seconds:.0f}} s. Ranks were started {{starts}} times:
{{kills}} kills, {{stalls}} stalls for longer than the group's timeout of {TIMEOUT_S:.0f} s, {{pauses}}
shorter pauses, {{exceptions}} failed steps ({{damaged}} of them by a flipped bit, the others by exceptions in
a memory or an exchange), {{skipped}} steps with NaN or Inf. After a kill the last rank raised
{{slowest_s:.2f}} s later at most.

Each plan also runs without its faults. "Kept" means: both runs end with the same parameters, bit for bit, on
all ranks; every rank raised a typed error for each fault, in the same step; a step that does not count left
the memory as it was; and what was brought is delivered or unsent. "Lost" is the share of that law's tolerance
that was used: "-" where a recipe forgets on purpose, or FSDP adds up before a rank has its gradient.
"""
ENDURANCE = f"""
## Endurance

{{steps:.0f}} steps of `topk` under DDP in {{seconds:.0f}} s, with a save and a report in every hundredth
part, and a listener. After a fifth of them threads and descriptors must stay as they are, and memory must not
grow by more than {BYTES_A_STEP:.0f} bytes a step. Rank 0:
"""
COUNTED = ("starts", "kills", "stalls", "pauses", "exceptions", "damaged", "skipped")


def main() -> int:
    """0 if every promise was kept; 1 else."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of chaos; a seed begun is ended")
    parser.add_argument("--steps", type=int, default=200, help="of each seed")
    parser.add_argument("--endurance", type=int, default=10_000, help="steps; 0 for none")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{datetime.date.today()}-soak.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples: list[Samples] = []
        if options.endurance:
            samples = endured(options.endurance, folder / "endurance")
            print("\n".join(table(samples[0])), flush=True)
        outcomes = chaos(options.seconds, options.steps, options.seed, folder)
    written(options.out, options.steps, outcomes, samples)
    wrong = [each for outcome in outcomes for each in outcome.complaints]
    wrong += [f"rank {rank}: {each}" for rank, held in enumerate(samples) for each in grown(held)]
    print("\n".join(wrong) or f"every promise was kept; {options.out}")
    return bool(wrong)


def chaos(seconds: float, steps: int, first: int, folder: Path) -> list[Outcome]:
    """Seeds one after the other, until their time is over; at least one."""
    until_s, outcomes = time.monotonic() + seconds, list[Outcome]()
    for seed in itertools.count(first):
        outcomes.append(outcome := carried_out(drawn(seed, steps), folder / str(seed)))
        print(row(outcome), *(f"    {each}" for each in outcome.complaints), sep="\n", flush=True)
        if time.monotonic() > until_s:
            return outcomes
    raise AssertionError("seeds do not end")


def row(outcome: Outcome) -> str:
    """A line of the table."""
    plan, counts = outcome.plan, outcome.counts
    lost = "-" if outcome.lost is None else f"{outcome.lost:.1g}"
    found = " | ".join(str(counts[each]) for each in COUNTED)
    verdict = "kept" if not outcome.complaints else f"**{len(outcome.complaints)} broken**"
    return (
        f"| {plan.seed} | {plan.source} | `{plan.recipe}` | {found} | {outcome.slowest_s:.2f} | {lost} | "
        f"{outcome.seconds:.0f} | {verdict} |"
    )


def written(path: Path, steps: int, outcomes: list[Outcome], samples: list[Samples]) -> None:
    """The report, as a page of Markdown."""
    total = {name: sum(each.counts[name] for each in outcomes) for name in COUNTED}
    broken = [f"- seed {each.plan.seed}: {text}" for each in outcomes for text in each.complaints]
    page = [
        f"# Soak, {datetime.date.today()}\n",
        MACHINE.format(machine=platform.machine(), cores=os.cpu_count(), torch=torch.__version__),
        CHAOS.format(
            seeds=len(outcomes),
            steps=steps,
            seconds=sum(each.seconds for each in outcomes),
            slowest_s=max(each.slowest_s for each in outcomes),
            **total,
        ),
        f"| seed | source | recipe | {' | '.join(COUNTED)} | slowest error, s | lost | seconds | promises |",
        "|---" * (7 + len(COUNTED)) + "|",
        *map(row, outcomes),
        "",
        *(broken or ["No promise was broken."]),
    ]
    if samples:
        wrong = [f"- rank {rank}: {each}" for rank, held in enumerate(samples) for each in grown(held)]
        held = samples[0]
        page.append(ENDURANCE.format(steps=held[-1]["step"], seconds=held[-1]["at_s"] - held[0]["at_s"]))
        page += [*table(held), "", *(wrong or ["Nothing has grown on any rank."])]
    path.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
