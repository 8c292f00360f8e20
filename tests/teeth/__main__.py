"""`make teeth`: plant faults, see which tests notice, and write a table to `benchmarks/results`.

First it records which functions each test enters, a file of tests at a time. Then it judges the faults. Both
go on where they were broken off. All of it takes ten hours; `--shard 1/4` and so on are parts of it. Remove
`out/teeth` after large changes, so that all is recorded anew.

    python -m tests.teeth --seed COMMIT
    python -m tests.teeth --record tests/laws tests/unit/step    # record these, and no more
    python -m tests.teeth --since COMMIT                         # only in functions that changed since then
    python -m tests.teeth --fastest --limit 100  # by a few tests of each function: some stay undecided
    python -m tests.teeth --count 12 --seed COMMIT --minutes 6   # a sample
    python -m tests.teeth --tier test --record --keep-fastest    # what a sample needs, written anew
    python -m tests.teeth --tier test --record --new --keep-fastest    # only files that it does not know

A sample records nothing: `fastest.json` says which tests of `make test` enter a function and are the fastest.
After them come the other tests in their files. Tests and functions that it does not know, or that are gone,
take no part.

Ends with 1 if a fault survives all tests that enter its function. A sample does so only if all of its faults
survive, as where tests do not test: its few tests may miss one, and a busy machine leaves some undecided.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from tests.support.source import ROOT
from tests.teeth import judging, recording, report, seams
from tests.teeth.mutants import Fault, changed, drawn

FIRST_SEED = "gradwire"
HALF, COMPILED = 95, 15
"""Faults that a seed draws, and how many of them at most are in `kernels/cpu`."""
RESULTS = ROOT / "benchmarks" / "results"


def main(words: list[str]) -> int:
    """As the module says."""
    options = _options(words)
    # An orderly end: copies are removed, and tests in them do not go on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not options.as_recorded:
        files = recording.files(options.record or ())
        if options.new:
            files = recording.new(files)
        if options.record is not None:  # a fault needs the recording of all tests, in whichever shard
            files = files[options.shard[0] - 1 :: options.shard[1]]
        for tier in _tiers(options):
            missing = [each for each in files if not recording.is_recorded(each, tier)]
            for file, tests, passed in recording.record(missing, tier):
                print(
                    f"recorded {file} as make {report.COMMANDS[tier]}: {tests} tests, {passed} passed",
                    flush=True,
                )
    if options.record is None:
        rows = _judge(options)
        states = [row["state"] for row in rows]
        print(f"{len(rows)} faults: {', '.join(f'{n} {state}' for state, n in Counter(states).items())}")
        if options.minutes:
            return len(rows) == options.count and set(states) == {"survived"}
        return "survived" in states
    if options.keep_fastest:
        recording.keep_fastest()
    return 0


def _tiers(options: argparse.Namespace) -> Sequence[str]:
    return recording.TIERS[: recording.TIERS.index(options.tier) + 1]


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.teeth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--record", nargs="*", metavar="PATH", help="record files of tests, and judge nothing")
    add("--new", action="store_true", help="with --record: only files that fastest.json does not know")
    add("--keep-fastest", action="store_true", help="with --record: write their tests to fastest.json")
    add("--fastest", action="store_true", help="record nothing; only the tests that fastest.json names")
    add("--as-recorded", action="store_true", help="record nothing; only faults that recorded tests enter")
    add("--tier", choices=recording.TIERS, default=recording.TIERS[-1], help="the last one that is run")
    add("--shard", type=_shard, default=(1, 1), metavar="I/N", help="one part of N")
    add("--seed", help="draws the second half: the hash of a commit")
    add("--count", type=int, help="as many faults, all of them drawn by --seed")
    add("--since", metavar="COMMIT", help="only faults in functions that have changed since")
    add("--minutes", type=float, help="for all of --count: a sample")
    add("--limit", type=float, default=judging.LIMIT_S, help="seconds for a fault's tests of a tier")
    add("--results", type=Path, help="lines of JSON, which a later run goes on from; none for a sample")
    add("--report", type=Path, help="the table")
    options = parser.parse_args(words)
    if options.count and not options.seed:
        parser.error("--count needs --seed")
    if options.minutes:
        if not options.count:
            parser.error("--minutes needs --count")
        options.fastest = True
    if options.fastest:
        options.as_recorded, options.tier = True, recording.TIERS[0]
    if not options.count:
        options.results = options.results or RESULTS / "teeth.jsonl"
        options.report = options.report or RESULTS / f"{datetime.date.today()}-teeth.md"
    return options


def _shard(text: str) -> tuple[int, int]:
    number, shards = map(int, text.split("/"))
    if not 1 <= number <= shards:
        raise ValueError(text)
    return number, shards


def _judge(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the results, of the faults that the options ask for."""
    items = recording.fastest() if options.fastest else recording.recorded()
    if not items:
        raise SystemExit("no test is recorded: run `python -m tests.teeth --record` first")
    known = report.read(options.results) if options.results else {}
    until_s = time.monotonic() + 60 * (options.minutes or 1e9)
    tiers = _tiers(options)
    tests = [each for each in items if each.tier in tiers]
    rows = []
    try:
        for half, faults, wanted in _halves(options):
            found = 0
            for fault in faults:
                if found == wanted or time.monotonic() > until_s:
                    break
                row = known.get(fault.name)
                covering = recording.covering(fault.function, tests)
                if row is None or _is_old(row, len(covering), options):
                    if options.as_recorded and not covering:
                        continue
                    if options.fastest:
                        covering = [*covering, *recording.beside(covering, tests)]
                    limit_s = min(options.limit, (until_s - time.monotonic()) / (wanted - found))
                    verdict = judging.judged(fault, covering, tiers, limit_s, smoke=half != HAND)
                    if options.fastest and not options.minutes and verdict.state == "survived":
                        verdict = replace(verdict, state="undecided")  # others enter its function, too
                    row = _row(half, fault, verdict, options.limit)
                    if options.results:
                        report.append(options.results, row)
                    by = verdict.by or f"{verdict.ran} tests"
                    print(f"{verdict.state}: {fault.function}: {fault.change} ({by})", flush=True)
                known[fault.name] = row
                if row["state"] != "smoke":
                    rows.append(row)
                    found += 1
    finally:  # of what there is, where the run is broken off
        if options.report:
            report.written(options.report, known.values(), items)
    return rows


def _row(half: str, fault: Fault, verdict: judging.Verdict, limit_s: float) -> dict[str, Any]:
    return {
        "fault": fault.name,
        "half": half,
        "room": fault.room,
        "function": fault.function,
        "line": fault.line,
        "change": fault.change,
        "commit": _commit(),
        "limit": limit_s,
        **asdict(verdict),
    }


def _is_old(row: Mapping[str, Any], covering: int, options: argparse.Namespace) -> bool:
    """Whether a fault is judged anew: its function has changed, or more tests enter it, or have more time."""
    if options.since and row["commit"] != _commit():
        return True
    if row["state"] == "undecided" and row["limit"] < options.limit:
        return True
    return row["state"] == "survived" and row["ran"] < covering


HAND = "by hand"


def _halves(options: argparse.Namespace) -> Iterator[tuple[str, Iterator[Fault], int]]:
    """The name of each part, its faults in the order in which they are tried, and how many are wanted."""
    number, shards = options.shard
    found: dict[str, tuple[Iterator[Fault], int]] = {}
    if options.count:
        found[options.seed] = drawn(options.seed, COMPILED), options.count
    else:
        by_hand = seams.faults()
        found[HAND] = iter(by_hand), len(by_hand)
        found |= {seed: (drawn(seed, COMPILED), HALF) for seed in (FIRST_SEED, options.seed) if seed}
    for name, (faults, wanted) in found.items():
        mine = islice(faults, number - 1, None, shards)
        yield (
            name,
            (each for each in mine if _is_new(each, options.since)),
            len(range(number - 1, wanted, shards)),
        )


def _is_new(fault: Fault, since: str | None) -> bool:
    """Whether the fault's function has changed since a commit."""
    return since is None or fault.function.partition(":")[2] in _changed(fault.path, since)


@cache
def _changed(path: str, since: str) -> set[str]:
    before = _git("show", f"{since}:{path}", check=False)
    return changed(before, (ROOT / path).read_text(encoding="utf-8"))


@cache
def _commit() -> str:
    return _git("rev-parse", "--short=10", "HEAD", check=False).strip()


def _git(*words: str, check: bool) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=check).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
