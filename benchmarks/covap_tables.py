"""COVAP beside its seven comparators on four emulated networks: tables II and VII and figures 7 to 10, here.

Meng et al. 2023, section IV.C: ResNet-101, VGG-19, BERT and GPT-2, their times from Table I (GPT-2's from its
CCR). Here the gradient shapes and ready times of networks like them (BERT uncased, GPT-2 inferred), shrunk to
what two cores can carry, compute slept, on 4 ranks over a link on which a dense all-reduce takes as long as
it did there. Every method with its published ratio and without a dense start. Share of linear is the speed
relative to the same step without communication. The paper's are its speed-ups over 64; it ran on 64 GPUs,
whose all-gathers are far longer than those of 4, and its sorts took GPU time that ours take from a CPU which
has nothing else to do; so the columns compare methods, not figures.

A second table breaks a step down as figures 7 to 10 do: computation, the codec, and what of communication is
not hidden; the codec works beside the backward pass, so that the sum may be more than the step. COVAP stands
there with the paper's order and cuts, with the paper's order alone, and as it is by default.

With `--alone` it is Table II instead: the same networks compute for a thousandth of the time, so that a step
is codec and communication alone. COVAP's interval is then the one of the paper. With `--published` it is,
too, and COVAP stands beside DDP, FP16, top-k and EFsignSGD in one run.

    python benchmarks/covap_tables.py [--only vgg19] [--alone] [--published] [--rounds 7] [--shrink 32]
        [--warmup 25] [--json PATH]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bench import bench

from gradwire_lab.workloads.catalogue import workload
from gradwire_lab.workloads.emulated import EmulatedWorkload

WORLD = 4
GPUS = 64
# Speed-ups of Table VII.
PUBLISHED = {
    "resnet101": (21.52, 10.48, 16.64, 3.76, 31.6, 29.92, 25.6, 57.52),
    "vgg19": (12.07, 3.51, 5.85, 2.66, 18.68, 33.37, 9.08, 51.80),
    "bert_base": (26.64, 15.28, 45.12, 19.92, 41.12, 45.36, 31.92, 57.84),
    "gpt2_covap": (19.10, 11.366, 12.35, 2.81, 33.44, 49.85, 35.13, 56.11),
}
SCHEMES = ("ddp", "topk", "dgc", "efsignsgd", "fp16", "powersgd", "oktopk", "covap")
INTERVALS = {"resnet101": 3, "vgg19": 4, "bert_base": 4, "gpt2_covap": 4}
"""The compression ratios of section IV: the published CCR, rounded up."""
TABLE_2 = {
    "topk": (1560, 603),
    "dgc": (25, 747),
    "randomk": (200, 653),
    "fp16": (5, 423),
    "efsignsgd": (20, -210),
    "powersgd": (20, 753),
    "oktopk": (500, 674),
}
"""Milliseconds of compression, and of communication saved, of VGG-19."""
# In three groups, each beside DDP: ten settings of four ranks at once would not fit into memory. Random-k has
# no row in Table VII, because it diverged.
GROUPS = (
    "covap(order='paper', sharding='paper', unit_mb={unit_mb:.3f}{and_interval});"
    "covap(order='paper'{and_interval});covap{interval}",
    "fp16;powersgd(warmup_steps=0);efsignsgd",
    "topk;dgc(warmup_steps=0, momentum=0.0);oktopk;randomk",
)
PUBLISHED_GROUP = (
    "covap(order='paper', sharding='paper', unit_mb={unit_mb:.3f}{and_interval});covap{interval};"
    "fp16;topk;efsignsgd"
)
"""The paper's COVAP and ours at its interval, and comparators that need no warm-up, all in one run."""
ALONE = 1e-3
"""Of its time a network computes where codec and communication are measured alone."""


def settings(model: str, shrink: float) -> tuple[str, str]:
    """The workload, and the link on which its dense all-reduce takes the published time."""
    text = f"emulated({model}, shrink={shrink:g})"
    work = workload(text)
    assert isinstance(work, EmulatedWorkload)
    return text, f"{work.suggested_rate_bit_per_s(WORLD) / 1e6:.0f}mbit"


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one network, bounds and DDP once."""
    text, rate = settings(model, options.shrink)
    unit_mb = 25 / options.shrink
    named = {"unit_mb": unit_mb, "interval": "", "and_interval": ""}
    if options.alone:
        text = text.replace(")", f", time_scale={ALONE:g})")
    if options.alone or options.published:
        interval = f"interval={INTERVALS[model]}"
        named |= {"interval": f"({interval})", "and_interval": f", {interval}"}
    rows: dict[str, dict[str, Any]] = {}
    for recipes in (PUBLISHED_GROUP,) if options.published else GROUPS:
        document = bench(
            *("--workload", text, "--workers", str(WORLD), "--rate", rate, "--peers", "ddp"),
            *("--bucket-cap-mb", f"{unit_mb:.3f}", "--recipes", recipes.format(**named)),
            *("--steps", "2", "--rounds", str(options.rounds), "--warmup", str(options.warmup)),
        )
        rows |= {row["name"]: row for row in document["rows"]} | rows
    published = dict(zip(SCHEMES, PUBLISHED[model], strict=True))
    for name, row in rows.items():
        speedup = published.get(name.split("(")[0])
        row["paper"] = None if speedup is None else 100 * speedup / GPUS
    return list(rows.values())


def breakdown(rows: list[dict[str, Any]]) -> str:
    """Figures 7 to 10: what a step consists of."""
    lines = [
        "| method | step, ms | forward and backward, ms | codec, ms | communication not hidden, ms |",
        "|---|---|---|---|---|",
    ]
    for row in [each for each in rows if each["step_s"] is not None]:
        computes_s = row["forward_s"] + row["backward_s"]
        times = (row["step_s"], computes_s, row["compress_s"], row["exposed_comm_s"])
        cells = ["-" if each is None else f"{1e3 * each:.0f}" for each in times]
        lines.append(f"| `{row['name']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def apart(model: str, rows: list[dict[str, Any]]) -> str:
    """Table II: codec and communication alone."""
    plain = next(row["step_s"] for row in rows if row["name"] == "ddp")
    lines = [
        "| method | codec, ms | codec and communication, ms | saved of DDP's, ms | of it, % "
        "| the paper's codec, ms | and saved, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in [each for each in rows if each["step_s"] is not None]:
        codec = "-" if row["compress_s"] is None else f"{1e3 * row['compress_s']:.1f}"
        saved_s = plain - row["step_s"]
        cells = [codec, f"{1e3 * row['step_s']:.0f}", f"{1e3 * saved_s:.0f}", f"{100 * saved_s / plain:.0f}"]
        published = TABLE_2.get(row["name"].split("(")[0]) if model == "vgg19" else None
        # The paper's saving leaves the codec out, ours contains it.
        cells += [f"{published[0]}", f"{published[1] / 8.42:.0f}"] if published else ["-", "-"]
        lines.append(f"| `{row['name']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Ours beside the paper's."""
    plain = next(row["step_s"] for row in rows if row["name"] == "ddp")
    lines = [
        "| method | step, ms | against ddp | share of linear, % | the paper's, % | sent, MB | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        paper = "-" if row["paper"] is None else f"{row['paper']:.1f}"
        if row["step_s"] is None:
            lines.append(f"| `{row['name']}` | {row['failed']} | | | {paper} | | |")
            continue
        sent = "-" if row["wire_bytes_per_step"] is None else f"{row['wire_bytes_per_step'] / 1e6:.2f}"
        lines.append(
            f"| `{row['name']}` | {row['step_s'] * 1e3:.0f} | {plain / row['step_s']:.2f}x "
            f"| {row['scaling'] * 100:.1f} | {paper} | {sent} | {_runs(row)} |"
        )
    return "\n".join(lines)


def _runs(row: dict[str, Any]) -> str:
    """What an adaptive recipe has decided on."""
    report = row.get("report") or {}
    return f"`{report['recipe']}`" if row["name"].startswith("covap") and report else ""


def main() -> None:
    """Print a table per network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=PUBLISHED)
    parser.add_argument("--alone", action="store_true", help="codec and communication alone: Table II")
    parser.add_argument("--published", action="store_true", help="COVAP at the paper's intervals: Table VII")
    parser.add_argument("--warmup", type=int, default=25, help="first steps that do not count")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shrink", type=float, default=32.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    raw = {}
    for model in PUBLISHED:
        if options.only in (None, model):
            raw[model] = rows = measure(model, options)
            text, rate = settings(model, options.shrink)
            shown = apart(model, rows) if options.alone else f"{table(rows)}\n\n{breakdown(rows)}"
            print(f"\n## {text}, {WORLD} ranks, {rate}\n\n{shown}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
