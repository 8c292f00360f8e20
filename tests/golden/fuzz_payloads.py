"""Random damage to what codecs decode and exchanges receive: a `WireError`, or a result within its bounds.

A decoder may believe a damaged value, for a format without a checksum cannot tell. It must not write outside
of its output, hang, take memory for a claim, or raise what callers do not expect.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm import ThreadComm, run_ranks
from gradwire.errors import RanksDisagree, TransportError, WireError
from gradwire.exchange.base import run as exchanged
from gradwire.exchange.ring import TRAILER_BYTES
from gradwire.unit.context import ExchangeContext, Part
from tests.golden.fuzz import mutate, sealed
from tests.laws.cases import CODECS, EXCHANGES, CodecCase, ExchangeCase
from tests.support.damage import Damage, DamagingComm

NUMEL, WORLD, UNLUCKY = 210, 2, 1
AT = ExchangeContext(step=3, unit=1, rank=0, world=3, seed=2, parts=(Part("weight", (14, 15), 0, NUMEL),))
MARGIN, MARK = 64, 123.0


def of_codecs(count: int, seed: int) -> Counter[str]:
    """`count` damaged payloads, shared out among all codecs; how often each came out how."""
    random, found = Random(seed), Counter[str]()
    for number in range(count):
        case = CODECS[number % len(CODECS)]
        payload = _payload(case).clone()
        mutate(payload.view(torch.uint8).numpy(), random)
        found[f"{_kind(case.name)}: {_decoded(case, payload)}"] += 1
    return found


@functools.cache
def _payload(case: CodecCase) -> Tensor:
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(5))
    return case.codec.encode(x, AT)


def _decoded(case: CodecCase, payload: Tensor) -> str:
    memory = torch.full((NUMEL + 2 * MARGIN,), MARK)
    out = memory[MARGIN:-MARGIN].zero_()
    try:
        case.codec.add_decoded(payload, out, 0.5, AT)
        said = "decoded"
    except WireError as error:
        said = _short(error)
    assert bool((memory[:MARGIN] == MARK).all() and (memory[-MARGIN:] == MARK).all()), case.name
    return said


def of_exchanges(count: int, seed: int) -> Counter[str]:
    """`count` steps in which a message is damaged, shared out among all exchanges."""
    return _struck(EXCHANGES, count, seed)


def of_rings(count: int, seed: int) -> Counter[str]:
    """The same of those whose messages hold frames."""
    return _struck([case for case in EXCHANGES if _is_framed(case)], count, seed)


def _is_framed(case: ExchangeCase) -> bool:
    return "gcomp" in case.name


def _struck(cases: Sequence[ExchangeCase], count: int, seed: int) -> Counter[str]:
    random, found = Random(seed), Counter[str]()
    for number in range(count):
        case = cases[number % len(cases)]
        damage = Mutation(random, random.randrange(max(1, _messages(case))), framed=_is_framed(case))
        found[f"{_kind(case.name)}: {_received(case, damage)}"] += 1
    return found


class Mutation(Damage):
    """Changes a message as `mutate` does.

    Where frames are `framed` in messages, half of them get their checksum made right again, as in `fuzz`.
    """

    def __init__(self, random: Random, message: int, *, framed: bool = False) -> None:
        super().__init__(message)
        self._random, self._framed = random, framed

    def strike(self, received: Tensor) -> None:
        """See `Damage.strike`."""
        raw = received.view(-1).view(torch.uint8)
        if len(self.sizes) == self.message and raw.numel():
            mutate(raw.numpy(), self._random)
            if self._framed and received.dtype == torch.uint8 and self._random.randrange(2):
                frame = raw[:-TRAILER_BYTES]
                sealed(frame) if frame.numel() else None  # a rank that failed sends a trailer alone
        self.sizes.append(raw.numel())


class Landed(NamedTuple):
    """The mean, and what lies around it."""

    mean: Tensor
    margins: Tensor


def _received(case: ExchangeCase, damage: Damage) -> str:
    def rank(comm: ThreadComm) -> Landed:
        damaging = DamagingComm(comm, damage if comm.rank == UNLUCKY else Damage())
        ctx = ExchangeContext(3, 1, comm.rank, WORLD, seed=2, parts=AT.parts)
        memory = torch.full((2, NUMEL + 2 * MARGIN), MARK)
        x, mean = memory[:, MARGIN:-MARGIN]
        x.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(comm.rank)))
        exchanged(case.exchange, x, mean, damaging, ctx)
        return Landed(mean, torch.cat([memory[:, :MARGIN], memory[:, -MARGIN:]]))

    try:
        landed = run_ranks(WORLD, rank)
    except (WireError, TransportError) as error:
        return _short(error)
    except RanksDisagree:
        return "lengths that peers do not share"
    assert all(bool((each.margins == MARK).all()) for each in landed), case.name
    return "decoded"


@functools.cache
def _messages(case: ExchangeCase) -> int:
    """How many messages the unlucky rank receives."""
    nothing = Damage()
    assert _received(case, nothing) == "decoded"
    return len(nothing.sizes)


def _kind(name: str) -> str:
    return name.split()[0]


def _short(error: Exception) -> str:
    return re.sub(r"[^A-Za-z '].*", "…", str(error))[:40]
