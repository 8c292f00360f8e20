"""Carries out a plan on real ranks, starts them again after what ended them, and judges what came of it."""

from __future__ import annotations

import pickle
import random
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.soak.plans import FATAL, WORLD, Fault, Plan
from tests.soak.scenes import train
from tests.support.ranks import Rank, started
from tests.support.recipes import ROWS

TIMEOUT_S = 10.0
"""Of the process group: long enough for a busy machine, short enough to wait for."""
PAUSE_S = (0.05, 0.5)
LATE_S = 2 * TIMEOUT_S
"""A wait that began before a fault ends within one timeout of it. A rank may begin one more: a call that is
lost because its peers were in a step."""
HANGS_S = 6 * TIMEOUT_S


class Attempt(NamedTuple):
    """What became of one start of the ranks."""

    results: dict[int, dict[str, Any]]
    """By rank, of those that ended by themselves."""
    ended_by: Fault | None = None
    sent_s: float = 0.0
    """When that fault came, by the monotonic clock."""
    hung: tuple[int, ...] = ()


@dataclass
class Outcome:
    """What a plan came to. Without `complaints` all promises were kept."""

    plan: Plan
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    """The longest time from a fatal fault to the last rank's error."""
    lost: float | None = None
    """What was lost, as a share of the tolerance; `None` where a recipe forgets on purpose."""
    complaints: list[str] = field(default_factory=list)


def carried_out(plan: Plan, folder: Path) -> Outcome:
    """Run `plan` twice, with its faults and without, and compare."""
    began_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        quiet = pool.submit(attempts, plan.without_faults(), folder / "quiet")
        loud = pool.submit(attempts, plan, folder / "loud")
        outcome = judged(plan, quiet.result()[-1], loud.result())
    outcome.seconds = time.monotonic() - began_s
    return outcome


def attempts(plan: Plan, place: Path) -> list[Attempt]:
    """All starts of the ranks until they have come to the end, or until something hangs or raises."""
    place.mkdir(parents=True)
    plan.write(place / "plan.json")
    due, made = list(plan.outer), list[Attempt]()
    draw = random.Random(plan.seed)
    most = 2 + len(plan.outer) + len(plan.inner)  # each fault may end one attempt
    while len(made) < most and not (made and _is_last(made[-1])):
        folder = place / str(len(made))
        folder.mkdir()
        made.append(_attempt(folder, due, draw))
    return made


def _is_last(attempt: Attempt) -> bool:
    """Whether to start again is no use: it has come to the end, or hangs, or raised what it must not.

    Without a fault from outside, an exception in a codec may have broken the transport, as gcomp's can.
    """
    ends = [each.get("value", {}).get("ended") for each in attempt.results.values()]
    return bool(attempt.hung) or (attempt.ended_by is None and set(ends) != {"lost"}) or None in ends


def _attempt(folder: Path, due: list[Fault], draw: random.Random) -> Attempt:
    """Ranks from their start to their end; faults that have come are taken from `due`."""
    fatal, sent_s = None, 0.0
    with started(train, WORLD, folder, TIMEOUT_S) as ranks:
        reached, since_s = -1, time.monotonic()
        while fatal is None and any(rank.process.is_alive() for rank in ranks):
            now = _reached(folder)
            if now > reached:
                reached, since_s = now, time.monotonic()
            if time.monotonic() - since_s > HANGS_S:
                break
            if due and due[0].step <= reached:
                fault = due.pop(0)
                time.sleep(draw.uniform(0.0, 0.03))  # at any moment of a step or of a save
                sent_s = time.monotonic()
                fatal = fault if _befall(ranks, fault, draw) else None
            time.sleep(0.002)
        hung = _waited_for(ranks, time.monotonic() + (HANGS_S if fatal else 1.0))
    found = {rank: folder / f"{rank}.pickle" for rank in range(WORLD)}
    results = {rank: pickle.loads(path.read_bytes()) for rank, path in found.items() if path.exists()}
    return Attempt(results, fatal, sent_s, hung)


def _reached(folder: Path) -> int:
    """The step that rank 0 has come to; -1 before the first."""
    lines = (folder / "0.out").read_text().split("\n")
    return int(lines[-2]) if len(lines) > 1 else -1


def _befall(ranks: Sequence[Rank], fault: Fault, draw: random.Random) -> bool:
    """Let a fault come from outside; whether it is one that no run survives."""
    victim = ranks[fault.rank]
    if fault.kind in ("kill", "kill two"):
        victim.process.kill()
        if fault.kind == "kill two":
            ranks[(fault.rank + 1) % WORLD].process.kill()
    elif victim.process.is_alive():
        victim.send_signal(signal.SIGSTOP)
        time.sleep(TIMEOUT_S + 2.0 if fault.kind == "stall" else draw.uniform(*PAUSE_S))
        victim.send_signal(signal.SIGCONT)
    return fault.kind in FATAL


def _waited_for(ranks: Sequence[Rank], deadline_s: float) -> tuple[int, ...]:
    """Wait for all; the ranks that still run at the deadline."""
    late = []
    for number, rank in enumerate(ranks):
        try:
            rank.wait(deadline_s - time.monotonic())
        except TimeoutError:
            late.append(number)
    return tuple(late)


# -- judging


def judged(plan: Plan, quiet: Attempt, loud: list[Attempt]) -> Outcome:
    """What the attempts say of the promises."""
    outcome = Outcome(plan)
    values = [{rank: each.get("value") for rank, each in attempt.results.items()} for attempt in loud]
    for number, (attempt, seen) in enumerate(zip(loud, values, strict=True)):
        said = _said_wrongly(plan, attempt, seen)
        outcome.complaints += [f"attempt {number}: {each}" for each in said]
        raised = [each["raised_s"] for each in seen.values() if each and "raised_s" in each]
        if attempt.ended_by is not None and attempt.ended_by.kind != "stall" and raised:
            outcome.slowest_s = max(outcome.slowest_s, max(raised) - attempt.sent_s)
    outcome.counts = _counted(plan, loud, values)
    calm = {rank: each.get("value") for rank, each in quiet.results.items()}
    for name, ended in (("undisturbed", calm), ("disturbed", values[-1])):
        if len(ended) < WORLD or any(each is None or each["ended"] != "well" for each in ended.values()):
            outcome.complaints.append(f"the {name} run did not end well: {ended}")
            return outcome
        digests = [ended[rank]["digest"] for rank in range(WORLD)]
        if len(set(digests[::2])) > 1 or len(set(digests[1::2])) > 1:
            outcome.complaints.append(f"replicas of the {name} run differ: {digests}")
        if plan.source != "hsdp" and len(set(digests)) > 1:
            outcome.complaints.append(f"parameters of the {name} run differ: {digests}")
        if (books := ended[0]["lost"]) is not None:
            share = books["apart"] / tolerance(plan, books["largest"])
            outcome.lost = share
            if share > 1.0:
                outcome.complaints.append(f"the {name} run lost {share:.1f} times what rounding may")
    ends = [[each[rank]["digest"] for rank in range(WORLD)] for each in (calm, values[-1])]
    if ends[0] != ends[1]:
        outcome.complaints.append(f"faults have left a trace in the parameters: {ends}")
    return outcome


def tolerance(plan: Plan, largest: float) -> float:
    """How much may seem lost: per step W + 6 float32 roundings of the largest norm.

    `docs/engineering/laws.md` derives it.

    Twice of them where ranks add up inside nodes first, and as many more as the coarsest recipe has.
    """
    coarse = max(sums.coarse for row in ROWS.values() for sums in (row.laws or {}).values())
    return plan.steps * (2 * (WORLD + 6) + coarse) * 2.0**-24 * largest


def _said_wrongly(plan: Plan, attempt: Attempt, seen: dict[int, Any]) -> list[str]:
    """What the ranks of one attempt did not say as promised."""
    wrong = [f"rank {rank} hangs" for rank in attempt.hung]
    wrong += [
        f"rank {rank} broke off: {attempt.results[rank]}" for rank, each in seen.items() if each is None
    ]
    seen = {rank: each for rank, each in seen.items() if each is not None}
    lost = {rank: each for rank, each in seen.items() if each["ended"] == "lost"}
    typed = {"TransportError", "RanksDisagree"} | {
        "plain": set[str](),  # nothing wraps the model
        "hsdp": {"WrapperFailed", "RuntimeError", "DistBackendError"},
    }.get(plan.source, {"WrapperFailed"})
    for rank, each in lost.items():
        *_, (step, kind, text) = each["seen"]
        if kind not in typed:
            wrong.append(f"rank {rank} raised {kind} in step {step}: {text}")
        if attempt.ended_by is not None and each["raised_s"] - attempt.sent_s > LATE_S:
            wrong.append(f"rank {rank} raised {each['raised_s'] - attempt.sent_s:.1f} s after the fault")
    if lost and attempt.ended_by is None and len(lost) < WORLD:
        wrong.append(f"only ranks {sorted(lost)} lost their peers")
    # Inside a node means are gathered after the status vote, when a neighbour may still die.
    wrong += [
        f"rank {rank}'s memory has changed in a step that does not count"
        for rank, each in seen.items()
        if not each["intact"] and not (plan.source in ("nodes", "hsdp") and each["ended"] == "lost")
    ]
    return wrong + _not_shared(plan, seen, typed)


def _not_shared(plan: Plan, seen: dict[int, Any], typed: set[str]) -> list[str]:
    """Steps that did not count for reasons that ranks do not agree on."""
    by_step: dict[int, dict[int, list[str]]] = {}
    for rank, each in seen.items():
        for step, kind, text in each["seen"]:
            by_step.setdefault(step, {}).setdefault(rank, []).append(kind)
            if kind == "skipped" and text != "no gradient is finite":
                return [f"step {step} is skipped on rank {rank}, where {text}"]
    befell = {each.step: each for each in plan.inner}
    return [
        f"step {step} failed as {kinds}"
        for step, kinds in by_step.items()
        if not any(typed & set(each) for each in kinds.values())  # the end of the attempt
        and any(kinds.get(rank, []) not in _expected(befell.get(step), rank) for rank in seen)
    ]


def _expected(fault: Fault | None, rank: int) -> list[list[str]]:
    """What `rank` may say of the step that `fault` befell."""
    if fault is None:
        return []
    if fault.kind in ("nan", "inf"):
        return [["skipped"]]
    if fault.kind == "flip":
        return [["WireError"]] if rank == fault.rank else [["PeerFailed"], ["WireError"]]
    return [["Accident"]] if rank == fault.rank else [["PeerFailed"]]


def _counted(plan: Plan, loud: list[Attempt], values: list[dict[int, Any]]) -> dict[str, int]:
    """How often each fault came, and how often ranks were started."""
    diaries = [[[kind for _, kind, _ in each["seen"]] for each in seen.values() if each] for seen in values]
    fatal = [each.ended_by.kind for each in loud if each.ended_by is not None]
    return {
        "starts": len(loud),
        "kills": sum(each.startswith("kill") for each in fatal),
        "stalls": fatal.count("stall"),
        "pauses": sum(each.kind == "pause" for each in plan.outer),
        # What befell a rank that was killed later, only the others can tell.
        "exceptions": sum(max(_failed(each) for each in kinds) for kinds in diaries if kinds),
        "damaged": sum(max(each.count("WireError") for each in kinds) for kinds in diaries if kinds),
        "skipped": sum(max(each.count("skipped") for each in kinds) for kinds in diaries if kinds),
    }


def _failed(kinds: list[str]) -> int:
    return kinds.count("Accident") + kinds.count("PeerFailed")
