"""Computes the deterministic figures of a report again, and compares them with those that it prints.

The commands are those that the report gives in backticks, if they are of `ALWAYS_ALIKE`: benchmarks whose
losses, accuracies, bytes and shares follow from seeds alone. Their tables are compared with the report's:
rows by the cells before the first figure, columns by their names. A figure is a number with a point, a per
cent or a spread. Columns of times are left out. Figures may differ in the last digit between processors.

    python benchmarks/again.py benchmarks/results/2026-11-25-scalecom-choice.md [--only TEXT]
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ALWAYS_ALIKE = ("covap_optimizers", "gcomp_report", "same_loss", "scalecom_choice", "scalecom_scaling")
"""Benchmarks that wait for no link and no clock."""
COMMAND = re.compile(r"`(?:python\s+)?benchmarks/(\w+)\.py([^`]*)`")
FIGURE = re.compile(r"[-+]?\d+(\.\d| ?%| ±)")
TIMES = re.compile(r"\b(ms|s|seconds|time|samples)\b")


class Cell(NamedTuple):
    """A figure as a table prints it: of which row, in which column, what."""

    row: str
    column: str
    text: str


def commands(report: str) -> list[list[str]]:
    """What a report says was run, as arguments after `python`; without those that are only sketched.

    >>> commands("So `python benchmarks/same_loss.py --seeds 2`, `benchmarks/mergecomp.py` and `make`.")
    [['same_loss.py', '--seeds', '2']]
    """
    found = []
    for name, rest in COMMAND.findall(report):
        command = [f"{name}.py", *shlex.split(rest)]
        if name in ALWAYS_ALIKE and not re.search(r"[…\[\]]", rest) and command not in found:
            found.append(command)
    return found


def cells(text: str) -> Iterator[Cell]:
    """All figures of the tables in Markdown, but those of times.

    >>> [tuple(cell) for cell in cells("| recipe | loss | ms |\\n|---|---|---|\\n| `int8` | 0.5 ± 0.1 | 7 |")]
    [('`int8`', 'loss', '0.5 ± 0.1')]
    """
    columns: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        row = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not columns:
            columns = row
        elif not set("".join(row)) <= set("-: "):
            first = next((at for at, cell in enumerate(row) if FIGURE.match(cell)), len(row))
            for column, cell in list(zip(columns, row, strict=False))[first:]:
                if FIGURE.match(cell) and not TIMES.search(column):
                    yield Cell(", ".join(row[:first]), column, cell)


def compared(report: str, printed: str) -> tuple[list[str], int, int]:
    """A line for each figure that differs; how many are the same, and how many it does not have.

    >>> told = "| recipe | loss |\\n|---|---|\\n| `int8` | 0.5 |\\n| `int4` | 0.6 |"
    >>> compared(told, told.replace("0.6", "0.7"))
    (['`int4`, loss: 0.6 in the report, 0.7 now'], 1, 0)
    """
    known: dict[tuple[str, str], set[str]] = {}  # several where a report has a table of each setting
    for cell in cells(report):
        known.setdefault((cell.row, cell.column), set()).add(cell.text)
    differ, same, unknown = [], 0, 0
    for row, column, text in cells(printed):
        told = known.get((row, column))
        if told is None:
            unknown += 1
        elif text in told:
            same += 1
        else:
            differ.append(f"{row}, {column}: {' or '.join(sorted(told))} in the report, {text} now")
    return differ, same, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what differs; 1 if anything does, or if a report has nothing to compute again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--only", default="", help="commands that contain this text")
    options = parser.parse_args(arguments)
    report = options.report.read_text()
    found = [command for command in commands(report) if options.only in shlex.join(command)]
    if not found:
        print("no command of the report has figures that follow from seeds alone")
    failed = not found
    for name, *rest in found:
        print(f"{shlex.join([name, *rest])} …", flush=True)
        done = subprocess.run([sys.executable, str(HERE / name), *rest], capture_output=True, text=True)
        if done.returncode:
            print(done.stderr)
        differ, same, unknown = compared(report, done.stdout)
        print(
            "\n".join(
                [*differ, f"{same} figures are the same, {len(differ)} differ, {unknown} are not in it"]
            )
        )
        failed = failed or bool(differ) or done.returncode != 0 or not same
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
