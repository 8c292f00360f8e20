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

import torch

from gradwire.comm.base import Comm, Pending, Verb
from gradwire.measure.aligned import shortest, slowest
from gradwire.measure.clock import now_s
from gradwire.measure.fit import Fit, straight_line
from gradwire.measure.pattern import hops, payload_for, serial_bytes
from gradwire.plan.costs import Link, Network

VERBS: tuple[Verb, ...] = ("all_reduce", "all_gather", "all_to_all", "shift")
"""Those that exchanges use and that all ranks leave together: the root of a broadcast is done when it has
sent, so no rank knows how long it took."""

WIRE_BYTES = (512, 4096, 32768, 131072, 524288, 2097152)
"""The sizes that are tried: from what is all latency to what outlasts any burst."""

REPETITIONS = 7


@dataclass(frozen=True)
class Probed:
    """One verb: the link as it finds it, and the line through (serial bytes, seconds)."""

    verb: Verb
    link: Link
    fit: Fit


def probe(
    comm: Comm,
    verbs: Sequence[Verb] = VERBS,
    *,
    budget_s: float = 0.25,
    wire_bytes: Sequence[int] = WIRE_BYTES,
    repetitions: int = REPETITIONS,
    clock: Callable[[], float] = now_s,
) -> tuple[Probed, ...]:
    """Measure `verbs` over `comm`; the same numbers on every rank. A collective.

    Each verb gets `budget_s` seconds, and the two smallest sizes in any case: sizes grow until the next would
    not fit. Raises `ValueError` for a verb that cannot be probed, and for a world of one.
    """
    if comm.world < 2:
        raise ValueError("a link needs two ranks: start several, with torchrun or `gradwire net run`")
    unknown = [verb for verb in verbs if verb not in VERBS]
    if unknown:
        raise ValueError(f"verbs={unknown}: can probe {', '.join(VERBS)}")
    return tuple(_probed(comm, verb, budget_s, wire_bytes, repetitions, clock) for verb in verbs)


def network_of(probed: Sequence[Probed]) -> Network:
    """The links by verb, at least one; for all others that of the first."""
    return Network(probed[0].link, {each.verb: each.link for each in probed})


def link_of(verb: Verb, world: int, fit: Fit) -> Link:
    """α and β from the line through (serial bytes, seconds) of a verb."""
    return Link(fit.line.base_s / hops(verb, world), fit.line.slope_s)


def _probed(
    comm: Comm,
    verb: Verb,
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
        alone_s = max(slowest(comm, _durations(comm, verb, payload, 1, clock)))
        if number >= 2 and alone_s * (repetitions + 1) > left_s:
            break
        taken = shortest(comm, _durations(comm, verb, payload, repetitions, clock))
        left_s -= alone_s + sum(taken)
        points.append((serial_bytes(verb, payload, comm.world), median(taken)))
    fit = straight_line(points)
    return Probed(verb, link_of(verb, comm.world, fit), fit)


def _durations(
    comm: Comm, verb: Verb, payload_bytes: int, repetitions: int, clock: Callable[[], float]
) -> list[float]:
    """Seconds from handing in to having all, of each of several in a row."""
    tensor = torch.zeros(payload_bytes // 4)
    durations = []
    for _ in range(repetitions):
        start_s = clock()
        _issue(comm, verb, tensor).wait()
        durations.append(clock() - start_s)
    return durations


def _issue(comm: Comm, verb: Verb, tensor: torch.Tensor) -> Pending:
    match verb:
        case "all_reduce":
            return comm.all_reduce(tensor)
        case "all_gather":
            return comm.all_gather(tensor.new_empty(comm.world, tensor.numel()), tensor)
        case "all_to_all":
            rows = tensor.view(comm.world, -1)
            return comm.all_to_all(torch.empty_like(rows), rows)
        case "shift":
            return comm.shift(torch.empty_like(tensor), tensor)
        case "broadcast":
            raise AssertionError("not probed")
