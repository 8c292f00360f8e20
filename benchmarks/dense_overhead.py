"""What does gradwire cost when it has nothing to do?

`attach(recipe="dense")` beside DDP without a hook, and DDP beside itself (the A/A spread), on a link that
is not shaped: the worst case, since nothing hides the hook. Goal: the lower end of the 95 % interval of
the paired ratio is at most 1.02.

    python benchmarks/dense_overhead.py [--workload resnet_demo] [--rounds 25] [--json PATH]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from gradwire.bench.statistics import Ratio, paired

DDP, AGAIN, DENSE = "ddp", "ddp()", "dense"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One `gradwire bench` run with DDP twice; its JSON document."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "gradwire.cli", "bench", "--workers", str(arguments.workers)]
        command += ["--rate", "unlimited", "--workload", arguments.workload, "--recipes", DENSE]
        command += ["--peers", f"{DDP};{AGAIN}", "--rounds", str(arguments.rounds)]
        command += ["--steps", str(arguments.steps), "--json", str(path)]
        subprocess.run(command, check=True)
        document: dict[str, Any] = json.loads(path.read_text())
        return document


def by_round(document: dict[str, Any], name: str, steps: int) -> list[float]:
    """Median step (s) of each round of a setting."""
    row = next(row for row in document["rows"] if row["name"] == name)
    all_s = row["step_s_all"]
    return [median(all_s[start : start + steps]) for start in range(0, len(all_s), steps)]


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="resnet_demo")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    document = measure(arguments)
    ddp, again, dense = (by_round(document, name, arguments.steps) for name in (DDP, AGAIN, DENSE))
    ratios = {"dense / ddp": paired(dense, ddp), "ddp / ddp (A/A)": paired(again, ddp)}
    print(f"\n{'pair':<18}{'ratio':>8}{'95 % interval':>20}")
    for name, ratio in ratios.items():
        print(f"{name:<18}{ratio.ratio:>8.3f}{f'{ratio.low:.3f} … {ratio.high:.3f}':>20}")
    print("goal: lower end of dense / ddp at most 1.02:", "met" if _low(ratios) <= 1.02 else "missed")
    if arguments.json:
        summary = {name: {"ratio": r.ratio, "low": r.low, "high": r.high} for name, r in ratios.items()}
        arguments.json.write_text(json.dumps({"ratios": summary, "bench": document}, indent=2) + "\n")


def _low(ratios: dict[str, Ratio]) -> float:
    return ratios["dense / ddp"].low


if __name__ == "__main__":
    main()
