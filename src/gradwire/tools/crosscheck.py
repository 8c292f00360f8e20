"""Comparison of verbs and recipes on the training's transport and device with gloo on the CPU.

It finds faults that one GPU cannot show: several devices under one transport. Each case runs twice with equal
inputs, over `comm` with tensors at `where`, and over gloo. Then all ranks compare results over a third comm,
so that they agree on every line, even if one of them failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from gradwire.comm.base import Algorithm, Broadcasting, Comm
from gradwire.exchange.base import Exchange, first_busy_step, run, steady_context
from gradwire.measure.clock import now_s
from gradwire.measure.probe import table_of
from gradwire.recipes import entries
from gradwire.unit.context import ExchangeState

CPU = torch.device("cpu")
SIZES = (1, 10_007)
NUMEL = 1 << 14
STEPS = 2
CLOSE = 2.0**-12
"""Largest difference of elements, relative to the largest one. A sum or a matrix product in another order
differs by some roundings of 2^-24; this allows for thousands. Misplaced or missing data differ by far
more."""
FEW = 1e-3
"""Share of elements that may differ by more than rounding. If a norm differs by a rounding, an element
between two levels, or one of two elements that compete for a place, may fall to the other side."""

Call = Callable[[Comm, torch.device], Tensor]


class Case(NamedTuple):
    """A computation to compare. If `shared`, its result must have equal bits on all ranks.

    `exact` cases must have the bits of gloo. `skip` is the reason for not trying it.
    """

    name: str
    call: Call | None
    exact: bool = False
    shared: bool = False
    skip: str = ""


@dataclass(frozen=True)
class Compared:
    """One line of the result, the same on all ranks. An empty `fault` means success."""

    name: str
    said: str
    fault: str = ""
    seconds: float = 0.0


def coded(rank: int, numel: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    """Small integers (numel,) of type `dtype` on the device `where`, which depend on rank and position: sums
    are exact, and misplaced data show.
    """
    return (torch.arange(numel, device=where) * 7 + 31 * rank).remainder(251).to(dtype)


def verb_cases() -> list[Case]:
    """Each verb by the library in float32 and in bytes, then by hops of our own."""
    library = [("all_reduce", torch.float32)]
    moved = ("broadcast", "all_gather", "all_to_all", "shift")
    library += [(verb, dtype) for verb in moved for dtype in (torch.float32, torch.uint8)]
    cases = [
        Case(f"{verb}, {str(dtype).removeprefix('torch.')}", partial(_library, verb, dtype), exact=True)
        for verb, dtype in library
    ]
    own = [way for way in get_args(Algorithm) if way != "library"]
    cases += [Case(f"all_reduce/{way}", partial(_own_sum, way), exact=True) for way in own]
    ways = [way for way in get_args(Broadcasting) if way != "library"]
    cases += [Case(f"broadcast/{way}", partial(_own_broadcast, way), exact=True) for way in ways]
    return cases


def _library(verb: str, dtype: torch.dtype, comm: Comm, where: torch.device) -> Tensor:
    return torch.cat([_issued(verb, coded(comm.rank, size, dtype, where), comm) for size in SIZES])


def _issued(verb: str, own: Tensor, comm: Comm) -> Tensor:
    if verb == "all_reduce":
        comm.all_reduce(own).wait()
        return own
    if verb == "broadcast":
        comm.broadcast(own, comm.world - 1).wait()
        return own
    if verb == "all_gather":
        out = own.new_zeros(comm.world, own.numel())
        comm.all_gather(out, own).wait()
        return out.view(-1)
    if verb == "all_to_all":
        rows = torch.stack([own + peer for peer in range(comm.world)])
        out = torch.zeros_like(rows)
        comm.all_to_all(out, rows).wait()
        return out.view(-1)
    out = torch.zeros_like(own)
    comm.shift(out, own).wait()
    return out


def _own_sum(way: Algorithm, comm: Comm, where: torch.device) -> Tensor:
    found = [coded(comm.rank, size, torch.float32, where) for size in SIZES]
    for each in found:
        comm.all_reduce(each, way).wait()
    return torch.cat(found)


def _own_broadcast(way: Broadcasting, comm: Comm, where: torch.device) -> Tensor:
    found = [coded(comm.rank, size, torch.float32, where) for size in SIZES]
    for each in found:
        comm.broadcast(each, 0, way).wait()
    return torch.cat(found)


STATED: Mapping[str, Mapping[str, Any]] = {"covap": {"interval": 2}, "mergecomp": {"split": "layers"}}
"""Options with which nothing has to be measured first."""


def recipe_cases(where: torch.device) -> Iterator[Case]:
    """Cases of all recipes, with their default options if these need no measurement."""
    for entry in entries():
        built = entry.build(**STATED.get(entry.name, {}))
        if built.next is not None:
            yield Case(entry.name, None, skip="decides after it has measured; it chooses among the others")
        elif where.type != "cpu" and not built.exchange.laws.stays_on_device:
            yield Case(entry.name, None, skip="the host reads what it sends; it goes by way of the host")
        else:
            yield Case(entry.name, partial(_means, built.exchange), shared=True)


def _means(exchange: Exchange, comm: Comm, where: torch.device) -> Tensor:
    """Run `STEPS` steps of an exchange on random gradients, with error feedback; the means of all steps.

    The result is (STEPS · NUMEL,), at `where`. A collective.
    """
    left, kept, means = torch.zeros(NUMEL, dtype=torch.float32, device=where), ExchangeState(), []
    first = first_busy_step(exchange, NUMEL, comm.world)
    for step in range(first, first + STEPS):
        draw = torch.Generator("cpu").manual_seed(1000 * step + comm.rank)
        x = torch.randn(NUMEL, generator=draw, dtype=torch.float32, device="cpu").to(where) + left
        ctx = replace(steady_context(NUMEL, comm.world, step, kept), rank=comm.rank, unsent=left)
        mean = torch.full_like(x, torch.nan)
        run(exchange, x, mean, comm, ctx)
        kept.commit()
        left = x
        means.append(mean)
    return torch.cat(means)


def crosscheck(
    cases: Sequence[Case],
    comm: Comm,
    where: torch.device,
    oracle: Comm,
    control: Comm,
    *,
    budget_s: float = 50.0,
    begins: Callable[[str], None] = lambda _name: None,
) -> Iterator[Compared]:
    """Run `cases` one after the other; a collective. `begins` hears first of each case.

    `comm` carries tensors at `where`; `oracle` and `control` are gloo's. After a case that fails on some
    ranks only, or after `budget_s` seconds on any, the rest is not tried, on any rank.
    """
    start_s, stopped = now_s(), ""
    for case in cases:
        if case.call is None or stopped:
            yield Compared(case.name, f"skipped: {stopped or case.skip}", fault=stopped)
            continue
        begins(case.name)
        case_s = now_s()
        mine = _Notes.of(case, comm, where, oracle)
        rows = table_of(control, [*mine.numbers, now_s() - case_s, now_s() - start_s])
        notes = [_Notes(row[0] > 0, *row[1:4]) for row in rows]
        seconds, since_s = max(row[4] for row in rows), max(row[5] for row in rows)
        yield _judged(case, notes, seconds)
        if any(each.failed for each in notes) and not all(each.failed for each in notes):
            stopped = f"not tried, because ranks may be out of step after {case.name}"
        elif since_s > budget_s:
            stopped = f"not tried within {budget_s:.0f} s"


class _Notes(NamedTuple):
    """A rank's result of a case, for the others."""

    failed: bool
    apart: float
    """The largest difference, relative to the largest element."""
    share: float
    """The share of elements that are further apart than `CLOSE`."""
    mark: float
    """Number that differs if results do."""

    @property
    def numbers(self) -> list[float]:
        return [float(self.failed), self.apart, self.share, self.mark]

    @classmethod
    def of(cls, case: Case, comm: Comm, where: torch.device, oracle: Comm) -> _Notes:
        assert case.call is not None
        expected = case.call(oracle, CPU)
        try:
            found = case.call(comm, where).cpu()
        except Exception as error:  # peers must hear of it
            print(f"rank {comm.rank}: {case.name}: {type(error).__name__}: {error}", flush=True)
            return cls(True, 0.0, 0.0, 0.0)
        digest = hashlib.blake2b(found.view(torch.uint8).numpy().tobytes(), digest_size=6).digest()
        return cls(False, *_distance(found, expected), float(int.from_bytes(digest)))


def _distance(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest difference relative to the largest element, and the share of large ones."""
    if torch.equal(found, expected):
        return 0.0, 0.0
    apart = (found.double() - expected.double()).abs().nan_to_num(torch.inf)
    apart /= max(float(expected.double().abs().max()), 1e-300)
    return float(apart.max()), float((apart > CLOSE).double().mean())


def _judged(case: Case, notes: Sequence[_Notes], seconds: float) -> Compared:
    """Judge a case by the notes of all ranks, by rank; the result is the same on all ranks.

    An error on any rank is a fault. So are ranks with different results in a `shared` case, and results that
    differ from gloo's: in an `exact` case by any bit, else in more than the share FEW of elements.
    """
    raised = [rank for rank, each in enumerate(notes) if each.failed]
    apart, share = max(each.apart for each in notes), max(each.share for each in notes)
    fault = ""
    if raised:
        fault = f"raised an error on ranks {raised}"
    elif case.shared and len({each.mark for each in notes}) > 1:
        fault = "ranks hold different means"
    elif apart and (case.exact or share > FEW):
        fault = f"differs from gloo by up to {apart:.2g} of the largest, {share:.2%} of elements by much"
    said = "same bits as gloo" if apart == 0.0 else f"within {apart:.1g} of the largest"
    return Compared(case.name, fault or said, fault, seconds)
