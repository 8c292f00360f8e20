"""What does gradwire cost when it has nothing to do?

`attach(recipe="dense")` beside DDP without a hook, and DDP beside itself (the A/A spread), on a link that
is not shaped: the worst case, since nothing hides the hook. Goal: the lower end of the 95 % interval of
the paired ratio is at most 1.02, and we take at most 1 % of a step in processor time: (CPU of dense - CPU of
DDP) / step of DDP, round by round, beside the same of DDP against itself. After equally many steps from equal
weights parameters must be the same bit for bit.

    python benchmarks/dense_overhead.py [--workload resnet_demo] [--rounds 25] [--json PATH]
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench import bench

from gradwire_lab.bench.statistics import Ratio, paired

DDP, AGAIN, DENSE = "ddp", "ddp()", "dense"


def by_round(document: dict[str, Any], name: str, steps: int, what: str = "step_s_all") -> list[float]:
    """Median step (s), or processor time of it, of each round of a setting."""
    all_s = _row(document, name)[what]
    return [median(all_s[start : start + steps]) for start in range(0, len(all_s), steps)]


def _row(document: dict[str, Any], name: str) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in document["rows"] if row["name"] == name)
    return row


def require_equal_bits(document: dict[str, Any]) -> str:
    """The fingerprint of all settings' parameters; ends the program where they differ."""
    found = {name: _row(document, name)["fingerprint"] for name in (DDP, AGAIN, DENSE)}
    if None in found.values() or len(set(found.values())) > 1:
        raise SystemExit(f"parameters differ between settings or ranks: {found}")
    return str(found[DDP])


def processor_shares(document: dict[str, Any], steps: int) -> dict[str, Ratio]:
    """What processor time each takes more than DDP, as a share of DDP's step."""
    step_s, ddp_s = by_round(document, DDP, steps), by_round(document, DDP, steps, "cpu_s_all")
    found = {}
    for label, name in (("dense - ddp", DENSE), ("ddp - ddp (A/A)", AGAIN)):
        more_s = [a - b for a, b in zip(by_round(document, name, steps, "cpu_s_all"), ddp_s, strict=True)]
        found[label] = paired(more_s, step_s)
    return found


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
    document = bench(
        *("--workers", str(arguments.workers), "--rate", "unlimited", "--workload", arguments.workload),
        *("--recipes", DENSE, "--peers", f"{DDP};{AGAIN}"),
        *("--rounds", str(arguments.rounds), "--steps", str(arguments.steps)),
    )
    ddp, again, dense = (by_round(document, name, arguments.steps) for name in (DDP, AGAIN, DENSE))
    ratios = {"dense / ddp": paired(dense, ddp), "ddp / ddp (A/A)": paired(again, ddp)}
    shares = processor_shares(document, arguments.steps)
    print(f"\n{'pair':<18}{'ratio':>8}{'95 % interval':>20}")
    for name, ratio in ratios.items():
        print(f"{name:<18}{ratio.ratio:>8.3f}{f'{ratio.low:.3f} … {ratio.high:.3f}':>20}")
    print(f"\n{'processor time':<18}{'of a step':>9}{'95 % interval':>22}")
    for name, share in shares.items():
        print(f"{name:<18}{share.ratio:>9.2%}{f'{share.low:.2%} … {share.high:.2%}':>22}")
    low, share = ratios["dense / ddp"].low, shares["dense - ddp"]
    print("\nparameters of all settings are bit-identical:", require_equal_bits(document))
    print("goal: lower end of dense / ddp at most 1.02:", "met" if low <= 1.02 else "missed")
    print("goal: processor time at most 1 % of a step:", "met" if share.ratio <= 0.01 else "missed")
    if arguments.json:
        summary = {name: asdict(ratio) for name, ratio in ratios.items()}
        processor = {name: asdict(share) for name, share in shares.items()}
        found = {"ratios": summary, "processor_share": processor, "bench": document}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
