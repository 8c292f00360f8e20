"""How near to linear is a step when communication takes 4 times as long as the backward pass?

An emulated VGG-19 (true shapes and ready times, compute slept) on 4 ranks, over a link on which a dense
all-reduce takes 4.0 times the backward pass. Peers are DDP's own hooks, PowerSGD of rank 1 in the one bucket
that it needs on gloo. Goals: 2.6x DDP's speed, 1.45x the fp16 hook's, PowerSGD's own, and 92 % of the speed
without communication. `bound again` beside `bound` shows the spread of a setting against itself.

    python benchmarks/near_linear.py [--rounds 7] [--recipes "covap(interval=4)"] [--json PATH]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bench import bench
from covap_ablation import EMULATED, UNIT_MB

WORLD = 4
GOALS = {"ddp": 2.6, "fp16_hook": 1.45, "powersgd_hook(bucket_cap_mb=100)": 1.0}


def table(rows: list[dict[str, Any]]) -> str:
    """Every setting beside the first recipe."""
    ours = next(row["step_s"] for row in rows if row["kind"] == "recipe")
    lines = [
        "| setting | step, ms | all rounds | share of linear, % | CPU, ms | against the recipe | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        goal = GOALS.get(row["name"])
        low, high = min(row["step_s_all"]), max(row["step_s_all"])
        lines.append(
            f"| `{row['name']}` | {row['step_s'] * 1e3:.0f} | {low * 1e3:.0f} … {high * 1e3:.0f} "
            f"| {row['scaling'] * 100:.1f} | {row['cpu_s'] * 1e3:.0f} | {row['step_s'] / ours:.2f} "
            f"| {'-' if goal is None else f'{goal:g}'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rate", default="256mbit")
    parser.add_argument("--recipes", default="covap(interval=4)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document = bench(
        *("--workload", EMULATED, "--workers", str(WORLD), "--rate", options.rate),
        *("--bucket-cap-mb", f"{UNIT_MB:.3f}", "--peers", ";".join(GOALS), "--recipes", options.recipes),
        *("--steps", str(options.steps), "--rounds", str(options.rounds)),
    )
    print(f"{EMULATED}, {WORLD} ranks, {options.rate}\n\n{table(document['rows'])}")
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
