"""What do the boundaries change? Nine compressors layer by layer, in one group, and as MergeComp plans them.

`gradwire bench` on an emulated model (a sleep instead of computation) and a slow link; per compressor one run
with DistributedDataParallel and the bound beside it. With `--splits`, some compressors under every way to
cut: layers, 1 to 4 even groups, the paper's search by timing steps, its search on the cost model, the optimum
of that, and the plan for a worker beside backward; `--ways` asks for some of these. "1 group again" is what
equal settings differ by. The paper's tables 2 and 3 are the speeds of two and three groups as timed beside
one group, and beside as many even ones, of ResNet-101:

    python benchmarks/mergecomp.py --workload "emulated(resnet101, shrink=32)" --warmup 110 --workers 2
        --splits fp16 "dgc(ratio=0.01, sample=0.01, warmup_steps=0)" efsignsgd --ways layer-wise "1 group"
        "1 group again" "2 even groups" "3 even groups" "timed, Y = 2" "timed, Y = 3"

With `--policy none` all tensors are compressed, 161 of ResNet-50, as in the paper; by default vectors and
tiny tensors travel densely in one piece, and 54 are left.

Differences from the paper: `randomk` is all-reduced, and `signsgd` and `signum` vote in two rounds, where it
gathers all but FP32 and FP16; `dgc` chooses exactly unless `sample` says otherwise.

Losses after equally many steps are compared on a real model with `--workload`, or over several seeds by
`same_loss.py --recipes` (see there).

    python benchmarks/mergecomp.py [--splits] [--workload "emulated(resnet50, shrink=32)"]
        [--policy none] [--json PATH]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bench import bench

COMPRESSORS = (
    "fp16",
    "dgc(ratio=0.01, momentum=0.0, warmup_steps=0)",
    "topk(ratio=0.01)",
    "randomk(ratio=0.01)",
    "efsignsgd",
    "qsgd",
    "signsgd",
    "onebit",
    "signum",
)
"""The paper's nine, at its 99 % sparsity and 8 bits."""

MODELS = (("layer-wise", "split='layers'"), ("one group", "split='even', groups=1"), ("planned", "groups=2"))
SPLITS = (
    ("layer-wise", "split='layers'"),
    ("1 group", "split='even', groups=1"),
    ("1 group again", "cuts=()"),
    ("2 even groups", "split='even', groups=2"),
    ("3 even groups", "split='even', groups=3"),
    ("4 even groups", "split='even', groups=4"),
    ("timed, Y = 2", "split='timed', groups=2"),
    ("timed, Y = 3", "split='timed', groups=3"),
    ("searched, Y = 2", "split='search', groups=2"),
    ("searched, Y = 3", "split='search', groups=3"),
    ("searched, Y = 4", "split='search', groups=4"),
    ("exact", "split='exact'"),
    ("planned", "split='planned'"),
)
ONE = ("one group", "1 group")

Row = dict[str, Any]


def run(recipes: list[str], arguments: argparse.Namespace) -> list[Row]:
    """The rows of one `gradwire bench`."""
    settings = ("workload", "rate", "workers", "steps", "rounds", "warmup", "policy")
    given = {name: getattr(arguments, name) for name in settings if getattr(arguments, name) is not None}
    options = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    rows: list[Row] = bench("--peers", "ddp", "--recipes", ";".join(recipes), *options)["rows"]
    return rows


def named(text: str, option: str) -> str:
    """A recipe's text."""
    return f"mergecomp(inner={text!r}, {option})"


def report(title: str, rows: list[Row], names: dict[str, str]) -> str:
    """Lines of a table in Markdown."""
    of_name = {row["name"]: row for row in rows}
    ddp = of_name["ddp"]["step_s"]
    took_s = {label: of_name[name]["step_s"] for name, label in names.items()}
    single = next((took_s[label] for label in ONE if label in took_s), None)
    lines = []
    for name, label in names.items():
        row = of_name[name]
        loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
        step_s, scaling = row["step_s"], row["scaling"]
        beside = "-" if single is None else f"{single / step_s:.2f}x"
        even_s = took_s.get(f"{label.removeprefix('timed, Y = ')} even groups")
        against = "-" if even_s is None else f"{even_s / step_s:.2f}x"
        speeds = f"{ddp / step_s:.2f}x | {beside} | {against} | {scaling:.1%}"
        lines.append(f"| {title} | {label} | {step_s * 1e3:.0f} | {speeds} | {loss} |")
    return "\n".join(lines)


HEADER = (
    "| compressor | cuts | step, ms | against DDP | of one group | of even ones | share of bound | loss |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--splits", metavar="RECIPE", nargs="*", help="by default topk(ratio=0.01)")
    parser.add_argument("--ways", nargs="+", choices=[label for label, _ in SPLITS], help="of `--splits`")
    parser.add_argument("--compressors", nargs="+", choices=COMPRESSORS, default=COMPRESSORS)
    parser.add_argument(
        "--policy", help="as `gradwire bench` takes it; none compresses every tensor, as the paper"
    )
    parser.add_argument("--workload", default="emulated(resnet50, shrink=32)")
    parser.add_argument("--rate", default="256mbit")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--warmup",
        type=int,
        default=110,
        help="steps; a contest with one group needs about 30, the timed search up to 100",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    compressors, splits = tuple(arguments.compressors), MODELS
    if arguments.splits is not None:
        compressors = tuple(arguments.splits) or ("topk(ratio=0.01)",)
        splits = tuple(each for each in SPLITS if each[0] in (arguments.ways or each))
    tables, documents = [HEADER], {}
    for text in compressors:
        names = {named(text, option): label for label, option in splits}
        rows = run(list(names), arguments)
        documents[text] = rows
        bound = next(row for row in rows if row["kind"] == "bound")
        tables.append(f"| {text} | bound | {bound['step_s'] * 1e3:.0f} | | | | | |")
        tables.append(report(text, rows, names))
    print("\n".join(tables))
    if arguments.json:
        arguments.json.write_text(json.dumps(documents, indent=1))


if __name__ == "__main__":
    main()
