"""Probes of links by a few small collectives on gradwire's own group: α and β of each verb.

Every size is sent several times in a row. The duration of a repetition is the minimum over ranks, that of a
size the median over repetitions. The first repetitions may exceed the link's bandwidth (a shaper's burst, a
switch's buffer), and others may be disturbed. A line through the sizes gives latency and bandwidth
(`gradwire.planning.links`). Decisions use only numbers on which ranks have agreed, so all ranks send the same
messages. These numbers travel in CPU tensors over the reducer's `control` comm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

import torch

from gradwire.comm.base import Algorithm, Comm, Round, Verb, gathered, issue_alone, wait_unread
from gradwire.measure.clock import now_s
from gradwire.planning.collectives import payload_for, serial_bytes
from gradwire.planning.costs import LONG_S, Link, Network
from gradwire.planning.links import Fit, link_of, straight_line


def table_of(comm: Comm, mine: Sequence[float]) -> list[list[float]]:
    """Every rank's numbers, by rank. One `gathered` of 8 bytes per number and rank."""
    rows: list[list[float]] = gathered(
        comm, torch.tensor(list(mine), dtype=torch.float64, device="cpu")
    ).tolist()
    return rows


def shortest(comm: Comm, durations_s: Sequence[float]) -> list[float]:
    """True durations of collectives, in seconds, from this rank's (end − start), in the order in which they
    ran.

    All ranks leave a collective together but may enter it at different times. An early rank's waiting is not
    transmission, so the minimum over ranks is the time of the wire (COVAP's distributed profiler, Meng et al.
    2023, section III-B). Clocks need not be synchronised.
    """
    return [min(column) for column in zip(*table_of(comm, durations_s), strict=True)]


def slowest(comm: Comm, seconds: Sequence[float]) -> list[float]:
    """Maxima of `seconds` over ranks, entry by entry. A collective, with the same result on all ranks."""
    return [max(column) for column in zip(*table_of(comm, seconds), strict=True)]


VERBS: tuple[Verb, ...] = ("all_reduce", "all_gather", "all_to_all", "shift")
"""Verbs that exchanges use and that all ranks leave together. The root of a broadcast is done when it has
sent, so no rank knows its duration."""

OWN = ("all_reduce/tree", "all_reduce/star")
"""All-reduces of gradwire's own that differ in cost from the library's, named as in a `Network`. A root is
done when it has sent, here too. But it cannot end the next collective before all others have begun it, so
several in a row take equally long on all ranks."""

WIRE_BYTES = (512, 4096, 32768, 131072, 524288, 2097152)
"""Sizes to try, in bytes: from pure latency to longer than any burst."""

REPETITIONS = 7
FEWEST = 3
"""Repetitions of the two smallest sizes, if one is slow and more do not fit: slow times vary little."""
BUDGET_S = 0.25
"""Seconds for the probe of one verb."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Probed:
    """Result for one verb, or one of `OWN`: the link, and the line through (serial bytes, seconds)."""

    verb: str
    link: Link
    fit: Fit


def probe(
    comm: Comm,
    verbs: Sequence[str] = VERBS,
    *,
    budget_s: float = BUDGET_S,
    wire_bytes: Sequence[int] = WIRE_BYTES,
    repetitions: int = REPETITIONS,
    clock: Callable[[], float] = now_s,
    control: Comm | None = None,
    where: torch.device = CPU,
    byte_s: float = 0.0,
) -> tuple[Probed, ...]:
    """Measure `verbs`, of `VERBS` and `OWN`, over `comm`. A collective; the same result on every rank.

    Args:
        comm: carries the probes, in tensors at `where`.
        verbs: the verbs to measure.
        budget_s: seconds per verb. The two smallest sizes are always tried; sizes grow until the next one
            would not fit.
        wire_bytes: sizes in bytes, ascending.
        repetitions: messages per size.
        clock: waits for the work in the current stream.
        control: carries the numbers that ranks exchange; `comm` by default.
        where: the device of the probes' tensors.
        byte_s: known seconds of a byte, which tell that a size would not fit without trying it; 0 if unknown.

    Raises `ValueError` for a verb that cannot be probed, and for a world of one.
    """
    if comm.world < 2:
        raise ValueError("a link needs two ranks: start several, with torchrun or `gradwire net run`")
    unknown = [verb for verb in verbs if verb not in (*VERBS, *OWN)]
    if unknown:
        raise ValueError(f"verbs={unknown}: can probe {', '.join((*VERBS, *OWN))}")
    return tuple(
        _probed(comm, control or comm, verb, budget_s, wire_bytes, repetitions, clock, where, byte_s)
        for verb in verbs
    )


def network_of(probed: Sequence[Probed]) -> Network:
    """Network of the links probed, by verb; `probed` has at least one. Other verbs get the first link."""
    return Network(probed[0].link, {each.verb: each.link for each in probed})


def name_of(round_: Round) -> str | None:
    """Name of the probe that measures the link of a round; `None` if its verb cannot be probed.

    >>> name_of(Round("all_reduce", 1, torch.float32, algorithm="tree"))
    'all_reduce/tree'
    >>> name_of(Round("all_reduce", 1, torch.float32, algorithm="ring"))
    'all_reduce'
    >>> name_of(Round("broadcast", 1, torch.float32)) is None
    True
    """
    if round_.name in OWN:
        return round_.name
    return round_.verb if round_.verb in VERBS else None


def _probed(
    comm: Comm,
    control: Comm,
    verb: str,
    budget_s: float,
    wire_bytes: Sequence[int],
    repetitions: int,
    clock: Callable[[], float],
    where: torch.device,
    byte_s: float,
) -> Probed:
    points: list[tuple[float, float]] = []
    left_s = budget_s
    for number, size in enumerate(wire_bytes):
        payload = payload_for(verb, size, comm.world)
        serial = serial_bytes(verb, payload, comm.world)
        if number >= 2 and byte_s * serial * (repetitions + 1) > left_s:
            break
        # A single message tells the cost of the others, and takes the first connection's share.
        alone_s = max(slowest(control, _durations(comm, verb, payload, 1, clock, where)))
        if number >= 2 and alone_s * (repetitions + 1) > left_s:
            break
        fitting = repetitions
        if alone_s >= LONG_S / 2:
            fitting = min(repetitions, max(FEWEST, int(left_s / alone_s) - 1))
        taken = shortest(control, _durations(comm, verb, payload, fitting, clock, where))
        left_s -= alone_s + sum(taken)
        points.append((serial, median(taken)))
    fit = straight_line(points)
    return Probed(verb, link_of(verb, comm.world, fit.line), fit)


def _durations(
    comm: Comm,
    verb: str,
    payload_bytes: int,
    repetitions: int,
    clock: Callable[[], float],
    where: torch.device,
) -> list[float]:
    """Time collectives, one after another.

    Args:
        comm: the ranks.
        verb: the collective.
        payload_bytes: bytes that a rank hands in.
        repetitions: number of collectives.
        clock: returns the present time in seconds.
        where: device of the tensors.

    Returns the seconds from handing in to having everything, of each.
    """
    tensor = torch.zeros(payload_bytes // 4, dtype=torch.float32, device=where)
    round_ = _round(verb, tensor.numel())
    durations = []
    for _ in range(repetitions):
        start_s = clock()
        wait_unread(issue_alone(comm, round_, tensor))  # an error on one rank would leave the others waiting
        durations.append(clock() - start_s)
    return durations


def _round(verb: str, numel: int) -> Round:
    """A round of `VERBS` or `OWN`."""
    name, _, algorithm = verb.partition("/")
    return Round(cast(Verb, name), numel, torch.float32, algorithm=cast(Algorithm, algorithm or "library"))
