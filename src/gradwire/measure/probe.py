"""What the links are like, from a few small collectives on our own group: α and β of each verb.

Every size is sent several times in a row. A repetition's duration is the shortest over ranks, a size's the
median over repetitions: the first ones may go through faster than the link can (a shaper's burst, a switch's
buffer), and others are disturbed. A line through the sizes gives latency and bandwidth. Nothing is decided
from numbers that the ranks have not agreed on, so all of them send the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

import torch

from gradwire.comm.base import Algorithm, Comm, Round, Verb, issue_alone
from gradwire.measure.aligned import shortest, slowest
from gradwire.measure.clock import now_s
from gradwire.measure.fit import Fit, straight_line
from gradwire.measure.pattern import hops, payload_for, serial_bytes
from gradwire.planning.costs import Link, Network

VERBS: tuple[Verb, ...] = ("all_reduce", "all_gather", "all_to_all", "shift")
"""Those that exchanges use and that all ranks leave together: the root of a broadcast is done when it has
sent, so no rank knows how long it took."""

OWN = ("all_reduce/tree", "all_reduce/star")
"""All-reduces of our own that cost otherwise than the library's, as a `Network` names them. A root is done
when it has sent, too, but cannot end the next one before all others have begun it, so that of several in a
row each takes as long on all ranks."""

WIRE_BYTES = (512, 4096, 32768, 131072, 524288, 2097152)
"""The sizes that are tried: from what is all latency to what outlasts any burst."""

REPETITIONS = 7


@dataclass(frozen=True)
class Probed:
    """One verb, or one of `OWN`: the link as it finds it, and the line through (serial bytes, seconds)."""

    verb: str
    link: Link
    fit: Fit


def probe(
    comm: Comm,
    verbs: Sequence[str] = VERBS,
    *,
    budget_s: float = 0.25,
    wire_bytes: Sequence[int] = WIRE_BYTES,
    repetitions: int = REPETITIONS,
    clock: Callable[[], float] = now_s,
    control: Comm | None = None,
) -> tuple[Probed, ...]:
    """Measure `verbs`, of `VERBS` and `OWN`, over `comm`; the same numbers on every rank. A collective.

    Ranks tell each other their numbers over `control`, by default the same comm.

    Each gets `budget_s` seconds, and the two smallest sizes in any case: sizes grow until the next would
    not fit. Raises `ValueError` for a verb that cannot be probed, and for a world of one.
    """
    if comm.world < 2:
        raise ValueError("a link needs two ranks: start several, with torchrun or `gradwire net run`")
    unknown = [verb for verb in verbs if verb not in (*VERBS, *OWN)]
    if unknown:
        raise ValueError(f"verbs={unknown}: can probe {', '.join((*VERBS, *OWN))}")
    return tuple(
        _probed(comm, control or comm, verb, budget_s, wire_bytes, repetitions, clock) for verb in verbs
    )


def network_of(probed: Sequence[Probed]) -> Network:
    """The links by verb, at least one; for all others that of the first."""
    return Network(probed[0].link, {each.verb: each.link for each in probed})


def name_of(round_: Round) -> str | None:
    """What to probe for the link of a round; `None` if that of its verb, or of the first, has to do.

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


def link_of(verb: str, world: int, fit: Fit) -> Link:
    """α and β from the line through (serial bytes, seconds) of a verb."""
    return Link(fit.line.base_s / hops(verb, world), fit.line.slope_s)


def _probed(
    comm: Comm,
    control: Comm,
    verb: str,
    budget_s: float,
    wire_bytes: Sequence[int],
    repetitions: int,
    clock: Callable[[], float],
) -> Probed:
    points: list[tuple[float, float]] = []
    left_s = budget_s
    for number, size in enumerate(wire_bytes):
        payload = payload_for(verb, size, comm.world)
        # One by itself tells what the others would cost, and takes the first connection's share.
        alone_s = max(slowest(control, _durations(comm, verb, payload, 1, clock)))
        if number >= 2 and alone_s * (repetitions + 1) > left_s:
            break
        taken = shortest(control, _durations(comm, verb, payload, repetitions, clock))
        left_s -= alone_s + sum(taken)
        points.append((serial_bytes(verb, payload, comm.world), median(taken)))
    fit = straight_line(points)
    return Probed(verb, link_of(verb, comm.world, fit), fit)


def _durations(
    comm: Comm, verb: str, payload_bytes: int, repetitions: int, clock: Callable[[], float]
) -> list[float]:
    """Seconds from handing in to having all, of each of several in a row."""
    tensor = torch.zeros(payload_bytes // 4)
    round_ = _round(verb, tensor.numel())
    durations = []
    for _ in range(repetitions):
        start_s = clock()
        issue_alone(comm, round_, tensor).wait()
        durations.append(clock() - start_s)
    return durations


def _round(verb: str, numel: int) -> Round:
    """A round of `VERBS` or `OWN`."""
    name, _, algorithm = verb.partition("/")
    return Round(cast(Verb, name), numel, torch.float32, algorithm=cast(Algorithm, algorithm or "library"))
