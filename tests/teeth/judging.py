"""What tests make of a fault: those that enter its function, fastest first, until one fails."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.teeth.copies import Copy, copied
from tests.teeth.mutants import COMPILED, Fault
from tests.teeth.recorder import FOLDER
from tests.teeth.recording import ROWS, TIERS, Item

LIMIT_S = 900.0
"""For the tests of a tier that enter a fault's function."""
SMOKE_S, COMPILED_S = 120.0, 600.0
"""For a step, without and with kernels to compile."""
_START_S = 60.0
"""A process may take so long before its first test, on a busy machine and with kernels to compile."""
HANGS = " (hangs)"
HANGS_S, _SLOWER = 20.0, 5.0
"""A test hangs that takes longer than so many seconds and so many times as long as in the recording."""


@dataclass(frozen=True)
class Verdict:
    """`state` is "killed", "survived", "undecided" or "smoke".

    `by` is the test that failed, of `tier`; if there is none, `tier` is the last one that was run. A fault
    that no test enters survives, with `ran` 0.
    """

    state: str
    tier: str = ""
    by: str = ""
    ran: int = 0
    seconds: float = 0.0


def judged(
    fault: Fault,
    covering: Sequence[Item],
    tiers: Sequence[str] = TIERS,
    limit_s: float = LIMIT_S,
    *,
    smoke: bool = False,
) -> Verdict:
    """Plant a fault and run `covering`, tier by tier, each for `limit_s` at most.

    With `smoke`, the state is "smoke" where not even a step can be made with the fault. Its time counts.
    """
    started_s = time.monotonic()
    recompiled = [fault.path] if fault.room == COMPILED else []
    with copied({fault.path: fault.text}, recompiled) as copy:
        if smoke or recompiled:
            words = ["tests.teeth.smoke", *recompiled]
            within_s = COMPILED_S if recompiled else SMOKE_S
            code = copy.run(words, min(within_s, limit_s))
            if code is None and limit_s < within_s:
                return Verdict("undecided", tiers[0], seconds=time.monotonic() - started_s)
            if smoke and code != 0:
                return Verdict("smoke", seconds=time.monotonic() - started_s)
        ran, state, until_s = 0, "survived", started_s + limit_s
        for tier in tiers:
            copy.environment["GRADWIRE_LAWS"] = ROWS[tier]
            for tests in _rounds([each for each in covering if each.tier == tier]):
                by, in_time = _failing(copy, tests, until_s)
                ran += len(tests)
                if by:
                    return Verdict("killed", tier, by, ran, time.monotonic() - started_s)
                if not in_time:
                    state = "undecided"
                    break
            until_s = time.monotonic() + limit_s
    return Verdict(state, tiers[-1], ran=ran, seconds=time.monotonic() - started_s)


def _rounds(items: Sequence[Item]) -> Iterator[list[Item]]:
    """In the order given: some seconds of tests, then four times as many, and so on.

    Each process takes seconds to start, and its files of tests to be collected.
    """
    full_s, taken_s, tests = 3.0, 0.0, list[Item]()
    for item in items:
        tests.append(item)
        taken_s += item.seconds
        if taken_s > full_s:
            yield tests
            full_s, taken_s, tests = 4 * full_s, 0.0, []
    if tests:
        yield tests


def _failing(copy: Copy, tests: Sequence[Item], until_s: float) -> tuple[str, bool]:
    """The test that fails or hangs twice; and whether the time was enough.

    A test that passes when it runs once more, alone, has failed for another reason, such as a busy machine.
    All of them run once more if it was what loads them that failed or hung.
    """
    while tests:
        by, in_time = _failed(copy, tests, until_s - time.monotonic())
        if not by:
            return "", in_time
        suspects = [each for each in tests if each.test == by.removesuffix(HANGS)] or tests
        again, in_time = _failed(copy, suspects, until_s - time.monotonic())
        if again or not in_time:
            return again, in_time
        tests = [each for each in tests if each not in suspects]
    return "", True


def _failed(copy: Copy, tests: Sequence[Item], left_s: float) -> tuple[str, bool]:
    """The test that failed, or hung; and whether the time that is left was enough."""
    folder = copy.root.parent
    seconds = {each.test: HANGS_S + _SLOWER * each.seconds for each in tests}
    (folder / "chosen.json").write_text(json.dumps(seconds), encoding="utf-8")
    (folder / "runs").write_text("", encoding="utf-8")
    copy.environment[FOLDER] = str(folder)
    hangs_s = _START_S + _SLOWER * sum(each.seconds for each in tests)
    plugins = ("-p", "no:cacheprovider", "-p", "tests.teeth.chosen", "--tb=no")
    files = dict.fromkeys(each.file for each in tests)
    code = copy.run(["pytest", "-q", "-x", *plugins, *files], max(0.0, min(hangs_s, left_s)))
    runs = (folder / "runs").read_text(encoding="utf-8") or "collection"
    if code is None:
        return (runs + HANGS, True) if hangs_s <= left_s else ("", False)
    if code == 4:
        raise RuntimeError(f"pytest takes no such words: {copy.output.read_text(errors='replace')[-500:]}")
    return ("", True) if code in (0, 5) else (runs, True)
