"""Everything that one GPU can show: `python -m tests.gpu.run [--out FILE] [--only PART,...]`.

Each part is a process of its own with a time budget, so that one that hangs or crashes ends alone. A table
comes last. Installs nothing; needs torch, Triton, pytest and hypothesis, and for some parts numba. Ends with
0 if nothing failed, also where there is no GPU, and with 1 otherwise. `--interpret` runs on the CPU what can
run there, to see that this program works: ranks over gloo, tiny models, and kernel tests, interpreted.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from tests.gpu.outcomes import Outcome, Status, outcome_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Part:
    """`tests/gpu/NAME.py`, the seconds that it may take, and what it does."""

    name: str
    budget_s: float
    does: str
    needs_numba: bool = False
    on_cpu: bool = False
    """Whether `--interpret` runs it on the CPU."""


CALLS = (
    (
        Part("graphs", 95, "two NCCL ranks with captured kernels: the bits of eager steps, host time, memory",
             on_cpu=True),
        Part("ranks", 300, "two and four NCCL ranks that share the GPU, over sockets: bits, faults, steps",
             on_cpu=True),
        Part("gpt2", 140, "steps of GPT-2 beside DDP and torch's hooks, one rank over NCCL", on_cpu=True),
        Part("versions", 35, "versions, whether numba works with this NumPy, the rate of a copy"),
    ),
    (
        Part("kernels", 180, "tests of kernels for devices, compiled: bits equal to the CPU's", on_cpu=True),
        Part("host", 140, "a step and the host's time beside DDP and torch's hooks, one rank over NCCL"),
        Part(
            "nccl", 200, "DDP over NCCL with one rank: waits of the host, futures, streams, scaler, compile"
        ),
    ),
    (
        Part("benchmarks", 180, "kernels beside a copy, host time of kernels, DDP, an emulated link"),
        Part("processes", 220, "trainings on 2 and 4 gloo ranks: the CPU's bits, NaN, killed ranks", True),
        Part("faults", 120, "compute-sanitizer over small kernel tests: memory errors and races"),
    ),
    (
        Part(
            "laws", 200, "laws of exchanges and steps, on ranks as threads with tensors on the device", True
        ),
    ),
)  # fmt: skip
"""Of less than ten minutes each, with kernels of Triton still to be compiled. First comes what no GPU has run
yet, captured kernels; then what nothing else here can show, several ranks over NCCL, and the table by which
defaults are decided; then what is likeliest to be wrong: what the compiler makes of kernels, then the host's
time for a unit, on which the constants of `gradwire.granularity` stand, then waits in lossy recipes. All else
follows from them.
"""
PARTS = tuple(part for call in CALLS for part in call)
INTERPRETED = 4.0
"""Times the budget: the interpreter is slow. (`ranks` has a deadline of its own.)"""
REPORT = ROOT / "benchmarks" / "results" / f"{date.today():%Y-%m-%d}-make-gpu.md"


@dataclass
class Done:
    """A part that has run, or why it has not."""

    part: Part
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, name: str, status: Status, detail: str) -> None:
        """What the part did not say itself."""
        self.outcomes.append(Outcome(name, status, detail))

    def count(self, status: Status) -> int:
        """Outcomes of one kind."""
        return Counter(each.status for each in self.outcomes)[status]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print the table; the exit code."""
    options = _parsed(arguments)
    longer = INTERPRETED if options.interpret else 1.0
    chosen = [replace(part, budget_s=longer * part.budget_s) for part in PARTS if part.name in options.only]
    missing = None if options.interpret else _missing_device()
    if missing is not None:
        print(f"{missing}: nothing is run. With a GPU this would run, in this order:")
        for call in CALLS:
            here = [part for part in call if part.name in options.only]
            if here:
                print(f'in less than 10 minutes, ARGS="--only {",".join(part.name for part in here)}":')
            for part in here:
                print(f"  {part.name:<11} up to {part.budget_s:3.0f} s  {part.does}")
        return 0
    device = "cpu" if options.interpret else "cuda:0"
    table: list[Done] = []
    unusable, has_numba = "", find_spec("numba") is not None
    for part in chosen:
        if unusable or (part.needs_numba and not has_numba):
            done = Done(part)
            done.add("all", "skipped", unusable or "it compares with the CPU's kernels, which need numba")
        else:
            print(f"== {part.name}: {part.does}", flush=True)
            done = perform(part, device, options.match)
            if part.name == "versions" and done.count("failed"):
                unusable = "gradwire cannot be used here: see versions"
        table.append(done)
    text = as_text(table)
    print(text)
    if options.out is not None:
        options.out.write_text(f"{heading(device)}\n\n{text}\n", encoding="utf-8")
        print(f"written to {options.out}")
    return int(any(done.count("failed") for done in table))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.gpu.run", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--out", type=Path, nargs="?", const=REPORT,
        help="write a dated report, too: to this file, or else to benchmarks/results",
    )  # fmt: skip
    parser.add_argument("--only", help="parts, separated by commas; all by default")
    parser.add_argument("--interpret", action="store_true", help="on the CPU, the parts that can run there")
    parser.add_argument(
        "--match",
        help="of kernels and laws only tests that pytest's -k finds, of ranks checks with this text",
    )
    options = parser.parse_args(arguments)
    if options.interpret:
        names = [part.name for part in PARTS if part.on_cpu]
    options.only = names if options.only is None else options.only.split(",")
    for name in options.only:
        if name not in names:
            parser.error(f"--only={name!r}: choose from {', '.join(names)}")
    return options


def heading(device: str) -> str:
    """The head of a report: when, on what, by which tree."""
    import torch

    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    tree = found.stdout.strip() or "a tree without git"
    on = "the CPU, over gloo: no figure says anything of a GPU"
    if device != "cpu":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        on = f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, NCCL {nccl}"
    return (
        f"# What does `make gpu` show? {date.today():%Y-%m-%d}\n\n"
        f"{on}. Python {platform.python_version()}, torch {torch.__version__}, tree {tree}."
    )


def _missing_device() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch ({error})"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def perform(part: Part, device: str, match: str | None = None) -> Done:
    """Run one part; what it did not say in time counts as failed."""
    command = [sys.executable, "-u", "-m", "tests.gpu.part", part.name]
    command += [] if match is None else [match]
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": ":".join(paths), "GRADWIRE_TEST_DEVICE": device}
    environment.setdefault("GRADWIRE_LAWS", "sample")
    environment.setdefault("GRADWIRE_LAWS_SEED", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # To ask for a device without opening it: a process that has opened it must not fork ranks.
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    done, log, start_s = Done(part), deque[str](maxlen=12), time.monotonic()
    # A session of its own, so that the ranks that it starts end with it.
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None

    def listen(lines: IO[str]) -> None:
        for line in lines:
            outcome = outcome_of(line)
            if outcome is not None:
                done.outcomes.append(outcome)
            elif line.strip():
                log.append(line.rstrip())
                print(f"   {line}", end="", flush=True)

    listener = threading.Thread(target=listen, args=(process.stdout,), daemon=True)
    listener.start()
    try:
        code = process.wait(part.budget_s)
        listener.join()
        if code != 0:
            done.add("the part itself", "failed", f"ended with {code}: {' / '.join(log)}")
        elif not done.outcomes:
            done.add("the part itself", "failed", "said nothing")
    except subprocess.TimeoutExpired:
        done.add("the part itself", "failed", f"had not ended after {part.budget_s:.0f} s")
    finally:
        _end(process)
        listener.join()
        process.stdout.close()
    done.seconds = time.monotonic() - start_s
    return done


def _end(process: subprocess.Popen[str]) -> None:
    """The process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def as_text(table: Sequence[Done]) -> str:
    """Every figure and every reason, then a line for each part, and a verdict."""
    lines = []
    for status, heading in (("passed", "figures"), ("skipped", "skipped"), ("failed", "failed")):
        said = [
            f"- {done.part.name}: {each.name}:{_apart(each.detail)}"
            for done in table
            for each in done.outcomes
            if each.status == status and (each.detail or status != "passed")
        ]
        lines += ["", f"{heading}:", *said] if said else []
    lines += ["", "| part | seconds | passed | failed | skipped |", "|---|---|---|---|---|"]
    lines += [
        f"| {done.part.name} | {done.seconds:.0f} of {done.part.budget_s:.0f} "
        f"| {done.count('passed')} | {done.count('failed')} | {done.count('skipped')} |"
        for done in table
    ]
    failed = sum(done.count("failed") for done in table)
    skipped = sum(done.count("skipped") for done in table)
    lines += ["", f"{failed} failed, {skipped} skipped" if failed or skipped else "everything passed"]
    return "\n".join(lines)


def _apart(detail: str) -> str:
    """A table stands on lines of its own."""
    return f"\n\n{detail}\n" if detail.startswith("|") else f" {detail}"


if __name__ == "__main__":
    sys.exit(main())
