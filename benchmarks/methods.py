"""Which method is worth its cost, on two real models over a slow link, and on more and more ranks?

Runs `gradwire bench` in groups that fit into memory, each with its own bound, and writes one dated report in
Markdown. Every recipe with the ratio that its paper publishes; peers are DistributedDataParallel's own.
Losses are those of the last counted step, after equally many steps from equal weights. `bound again` beside
`bound` shows the spread of a setting against itself.

    python benchmarks/methods.py REPORT.md [--steps 4] [--rounds 7] [--only resnet18] [--keep FOLDER]

`--keep` leaves the document of every run in a folder, where a call that was interrupted finds it again.
"""

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PEERS = "ddp;fp16_hook;powersgd_hook(bucket_cap_mb=100)"
GROUPS = (
    (PEERS, "leader_topk;topk;lwtopk"),
    ("ddp", "mstopk;randomk;dgc(warmup_steps=0, momentum={momentum});oktopk;gtopk"),
    ("ddp", "sidco;threshold;adacomp;sketchsgd;local_every"),
    ("ddp", "fp16;bf16;int8;int4;fp8;truncate"),
    ("ddp", "efsignsgd;onebit;signsgd;signum(momentum={momentum});qsgd;terngrad"),
    ("ddp", "powersgd(warmup_steps=0);acpsgd(warmup_steps=0);covap"),
)
MODELS = {"resnet18": ("200mbit", "0.9"), "chargpt": ("50mbit", "0.0")}
"""Link, and the momentum of recipes that apply it themselves; chargpt's AdamW has its own."""
OUT = (
    "topk;leader_topk;randomk",
    "oktopk;gtopk;sketchsgd",
    "int8;efsignsgd;qsgd",
    "powersgd(warmup_steps=0);covap(interval=4)",
    "lwtopk;mstopk;sidco",
    "dgc(warmup_steps=0, momentum=0.0);threshold;adacomp",
    "local_every;fp16;bf16",
    "int4;fp8;truncate",
    "onebit;signsgd;signum(momentum=0.0)",
    "terngrad;acpsgd(warmup_steps=0);gcomp(mode='truncate')",
)
"""Three at a time: eight ranks of each of them are in memory at once."""
SCALE_OUT = ("emulated(vgg19, shrink=32)", "256mbit")
WORLDS = (2, 4, 8)

Rows = list[dict[str, Any]]


def bench(*arguments: str, keep: Path | None = None) -> dict[str, Any]:
    """The document of one `gradwire bench`, from the folder `keep` if it has run before."""
    with tempfile.TemporaryDirectory() as folder:
        name = hashlib.blake2b(repr(arguments).encode(), digest_size=8).hexdigest() + ".json"
        document = (keep or Path(folder)) / name
        if not document.exists():
            command = [str(Path(sys.executable).with_name("gradwire")), "bench", *arguments]
            subprocess.run([*command, "--json", str(document)], check=True)
        found: dict[str, Any] = json.loads(document.read_text())
        return found


def compare(keep: Path, workload: str, settings: list[str]) -> list[dict[str, Any]]:
    """All groups on one model."""
    rate, momentum = MODELS[workload]
    return [
        bench(
            *("--workload", workload, "--rate", rate, "--peers", peers),
            *("--recipes", recipes.format(momentum=momentum), *settings),
            keep=keep,
        )
        for peers, recipes in GROUPS
    ]


def scale_out(keep: Path, settings: list[str]) -> list[dict[int, dict[str, Any]]]:
    """The same model on more and more ranks; compute is slept, so that two cores can carry them."""
    workload, rate = SCALE_OUT
    common = ["--workload", workload, "--rate", rate, "--bucket-cap-mb", "0.78", "--peers", "ddp", *settings]
    return [
        {world: bench("--workers", str(world), "--recipes", recipes, *common, keep=keep) for world in WORLDS}
        for recipes in OUT
    ]


def number(value: float | None, scale: float = 1.0, digits: int = 0) -> str:
    """A cell."""
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def table(documents: list[dict[str, Any]]) -> str:
    """One line per setting; ratios are to the bound and to DDP of its own group, which ran in turn."""
    lines = [
        "| setting | step, ms | against DDP | share of bound | sent, kB | at the interface, kB "
        "| compress, ms | exposed, ms | CPU, ms | peak, MB | loss | replicas |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rows in (document["rows"] for document in documents):
        plain = next(row["step_s"] for row in rows if row["name"] == "ddp")
        lines += [_line(row, plain) for row in rows]
    return "\n".join(lines)


def _line(row: dict[str, Any], plain_s: float) -> str:
    if row["step_s"] is None:
        return f"| {row['name']} | {row['failed']} |" + " |" * 10
    cells = [
        number(row["step_s"], 1e3),
        number(plain_s / row["step_s"], 1, 2) + "x",
        number(row["scaling"], 100) + " %",
        number(row["wire_bytes_per_step"], 1e-3, 1),
        number(row["interface_bytes_per_step"], 1e-3, 1),
        number(row["compress_s"], 1e3, 1),
        number(row["exposed_comm_s"], 1e3),
        number(row["cpu_s"], 1e3),
        number(row["peak_bytes"], 1e-6),
        number(row["loss"], 1, 3),
        {True: "identical", False: "**differ**", None: "-"}[row["replicas_identical"]],
    ]
    return f"| `{row['name']}` | " + " | ".join(cells) + " |"


def worlds_table(groups: list[dict[int, dict[str, Any]]]) -> str:
    """Step, bytes per rank and memory over the number of ranks; every group with its own bound and DDP."""
    header = "| setting | " + " | ".join(f"{w} ranks: step, ms / sent, kB / peak, MB" for w in WORLDS) + " |"
    lines = [header, "|---|" + "---|" * len(WORLDS)]
    for documents in groups:
        for name in [row["name"] for row in documents[WORLDS[0]]["rows"]]:
            cells = [_cell(document["rows"], name) for document in documents.values()]
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rows: Rows, name: str) -> str:
    row = next((row for row in rows if row["name"] == name), None)
    if row is None or row["step_s"] is None:
        return "-" if row is None else str(row["failed"])
    scaled = ((row["step_s"], 1e3, 0), (row["wire_bytes_per_step"], 1e-3, 1), (row["peak_bytes"], 1e-6, 0))
    return " / ".join(number(*each) for each in scaled)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--steps", default="4")
    parser.add_argument("--rounds", default="7")
    parser.add_argument("--only", choices=[*MODELS, "scale-out"])
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    settings = ["--steps", options.steps, "--rounds", options.rounds]
    with tempfile.TemporaryDirectory() as folder:
        keep = options.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        options.report.write_text(report(keep, settings, options.only))


def report(keep: Path, settings: list[str], only: str | None) -> str:
    """Run, and write it down."""
    today = datetime.datetime.now(tz=datetime.UTC).date()
    _, steps, _, rounds = settings
    sections = [f"# All methods, {today}\n\nMedians over {rounds} x {steps} steps, settings in turn.\n"]
    for workload, (rate, _momentum) in MODELS.items():
        if only in (None, workload):
            documents = compare(keep, workload, settings)
            sections.append(f"## {workload}, 2 ranks, {rate}\n\n{table(documents)}\n")
    if only in (None, "scale-out"):
        title = f"## {SCALE_OUT[0]}, {SCALE_OUT[1]} per rank\n"
        sections.append(f"{title}\n{worlds_table(scale_out(keep, settings))}\n")
    return "\n".join(sections)


if __name__ == "__main__":
    main()
