"""What does COVAP's hook cost per step beside torch's PowerSGD (rank 1) and fp16 hooks, in CPU seconds?

`gradwire bench` on the gradient shapes of a published network without a link limit. CPU time is that of a
rank's process with all its threads, the kernel's network stack among them: the median over steps, less that
of the same step without any communication (`bound`); `bound again` shows how well the difference can be
known. DDP's own all-reduce is what a hook replaces. Goals: at most 0.25 of PowerSGD's, at most fp16's.

    python benchmarks/covap_hook_cost.py [--workload "emulated(vgg19, shrink=16)"] [--json PATH]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from methods import bench

PEERS = "ddp;fp16_hook;powersgd_hook(bucket_cap_mb=1000)"
RECIPES = "covap(interval=4);covap(interval=2);dense"


def table(rows: list[dict[str, Any]]) -> str:
    """CPU per step beyond the bound's, and relative to the two hooks'."""
    bound = next(row["cpu_s"] for row in rows if row["name"] == "bound")
    cost = {row["name"]: row["cpu_s"] - bound for row in rows if row["cpu_s"] is not None}
    fp16, power = (next(s for name, s in cost.items() if name.startswith(n)) for n in ("fp16", "powersgd"))
    lines = [
        "| setting | CPU per step, ms | beyond the bound | of PowerSGD's | of fp16's |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in cost.items():
        lines.append(
            f"| `{name}` | {(seconds + bound) * 1e3:.1f} | {seconds * 1e3:.1f} "
            f"| {seconds / power:.2f}x | {seconds / fp16:.2f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", default="emulated(vgg19, shrink=16)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document = bench(
        *("--workload", options.workload, "--workers", str(options.workers), "--rate", "unlimited"),
        *("--peers", PEERS, "--recipes", RECIPES, "--steps", "4", "--rounds", str(options.rounds)),
    )
    print(f"{options.workload}, {options.workers} ranks, no link limit\n\n{table(document['rows'])}")
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
