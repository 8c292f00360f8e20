"""What is declared to stay on a device never makes the host wait for it, and computes the same there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.codec.sparse import SparseLayout
from gradwire.comm import Comm, Round, ThreadComm, run_ranks
from gradwire.errors import WireError
from gradwire.exchange.base import Decode, parts, run
from gradwire.exchange.dense import dense
from gradwire.kernels.dispatch import Kernels
from gradwire.laws import Laws
from gradwire.step.step import Step
from gradwire.unit.context import ExchangeContext, ExchangeState
from gradwire.unit.parameters import WHOLE
from tests.laws.cases import EXCHANGES, F32, ExchangeCase
from tests.laws.rows import Row, perform
from tests.support.bits import bits
from tests.support.elsewhere import Carrying, Elsewhere, MixedError, There
from tests.support.gradients import KINDS
from tests.support.looped import looped

DECLARED = [case for case in EXCHANGES if case.exchange.laws.stays_on_device]
OTHERS = [case for case in EXCHANGES if not case.exchange.laws.stays_on_device]
NORMAL = KINDS[1]
by_kind = partial(looped, "case", by=lambda case: case.kind, few=1)


def placed(row: Row) -> tuple[list[str], list[tuple[Tensor, Tensor]]]:
    """What made the host wait, and every rank's mean and rest, of the second of two steps elsewhere.

    In the first one tables are copied there, and what a step keeps gets there.
    """
    inputs, reads, flags = row.inputs(), [], []

    def body(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        kept = ExchangeState()
        for number in range(2):
            x, mean = inputs[comm.rank].clone(), torch.full_like(inputs[comm.rank], torch.nan)
            ctx = row.context(comm.rank)
            assert ctx.unsent is not None
            unsent = There(ctx.unsent)
            see, kernels = (lambda sound, _text: flags.append(sound)), Kernels(unsent.device, row.dtype)
            ctx = replace(ctx, unsent=unsent, kept=kept, see=see, kernels=kernels)
            with Elsewhere() as elsewhere:
                run(row.case.exchange, There(x), There(mean), Carrying(comm), ctx)
            kept.commit()
            if number == 1:
                reads.extend(elsewhere.reads)
        return mean, x

    found = run_ranks(row.world, body)
    assert all(flag.inner for flag in flags), row
    return reads, found


@by_kind(DECLARED)
def test_what_is_declared_to_stay_on_the_device_does_and_computes_the_same_there(case: ExchangeCase) -> None:
    row = Row(case, 3, 1000, F32, NORMAL, (12, 0))
    reads, found = placed(row)
    assert not reads
    assert all(bits(mean) == bits(found[0][0]) for mean, _unsent in found)
    if case.exchange.laws.grain != WHOLE:  # others go on from the first step's factors
        largest = max(float(x.abs().max()) for x in row.inputs())
        for held, (mean, unsent) in zip(perform(row).ranks, found, strict=True):
            # Kernels and references sum in other orders: as in `test_reference_path`.
            assert torch.allclose(held.mean, mean, rtol=1e-5, atol=1e-6 * largest)
            assert torch.allclose(held.unsent, unsent, rtol=1e-5, atol=1e-6 * largest)


@looped("size", [0, 1, 7], few=1)
def test_so_do_small_units(size: int) -> None:
    # Of each exchange that others are made of, the first: their branches for next to nothing.
    firsts = {type(part): case for case in reversed(DECLARED) for part in parts(case.exchange)}
    for case in set(firsts.values()):
        reads, _found = placed(Row(case, 2, size, F32, NORMAL, (12, 0)))
        assert not reads, case


@by_kind(OTHERS)
def test_what_is_not_declared_does_make_the_host_wait(case: ExchangeCase) -> None:
    assert waits(Row(case, 3, 1000, F32, NORMAL, (12, 0)))


def waits(row: Row) -> bool:
    """Whether the host waits, or does not get that far: GComp mixes the host's memory with the device's."""
    try:
        reads, _found = placed(row)
    except MixedError:
        return True
    return bool(reads)


@looped(("count", "numel"), [(3, 1000), (300, 1000), (700, 1000)])
def test_places_that_cannot_be_are_told_without_a_read(count: int, numel: int) -> None:
    layout, values = SparseLayout(count, numel, F32), torch.ones(numel)
    payload = layout.take(values, torch.arange(count) * (numel // count))
    payload[: 4 * layout.shape.words] ^= 0x5A
    out, told = torch.zeros(numel), []
    with Elsewhere() as elsewhere:
        layout.add(There(payload), There(out), 1.0, lambda sound, text: told.append((sound, text)))
        step = Step(0, "plan")
        step.note_valid(*told[0])
        assert not elsewhere.reads
        assert not step.is_finite()  # that is the read, once a step
        assert elsewhere.reads
    assert not out.any()
    with pytest.raises(WireError, match=f"no choice of {count} of {numel} indices"):
        Step(0, "plan").note_valid(told[0][0].inner, told[0][1])


@dataclass(frozen=True)
class Planted:
    """A plain all-reduce that looks at its result."""

    look: Callable[[Tensor], Any]
    laws = Laws(stays_on_device=True)
    memory = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """As `dense`."""
        finish_all = dense().start(x, mean, comm, ctx)

        def decode() -> None:
            finish_all()
            self.look(mean)

        return decode

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        """As `dense`."""
        return dense().rounds(numel, dtype, ctx)


def assign(x: Tensor) -> None:
    x[x > 0] = x[x > 0]


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "int": lambda x: int(x.argmax()),
    "float": lambda x: float(x.sum()),
    "index": lambda x: range(10)[x.argmax() % 10],
    "a place": lambda x: x[x.argmax()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "a copy to the host": lambda x: x.cpu(),
    "a copy into the host's memory": lambda x: torch.empty(1000).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: torch.unique(x),
    "equal": lambda x: torch.equal(x, x),
    "a mask as an index": lambda x: x[x > 0],
    "a mask as a place": assign,
    "a number at places": lambda x: x.__setitem__(x[:2].long().clamp(0, 2), 1.0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "torch.tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "torch.as_tensor": lambda x: torch.as_tensor(3.0, device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "a copy there": lambda x: torch.ones(1000).to(x.device),
    "a copy into memory there": lambda x: x.copy_(torch.ones(1000)),
}


@looped("what", LOOKS)
def test_a_planted_look_is_found(what: str) -> None:
    case = ExchangeCase(what, Planted(LOOKS[what]))
    reads, _found = placed(Row(case, 2, 1000, F32, NORMAL, (12, 0)))
    assert reads


def test_what_only_enqueues_is_none() -> None:
    def enqueue(x: Tensor) -> None:
        torch.where(x > 0, x, 0.0).cumsum(0).scatter_(0, x.abs().argsort(), x)
        x.masked_fill_(x > 1, torch.full_like(x, 2.0).max())
        torch.zeros(3, device=x.device).index_fill_(0, x[:2].long().clamp(0, 2), 1.0)
        torch.ones(1000).to(x.device, non_blocking=True)

    reads, _found = placed(Row(ExchangeCase("enqueue", Planted(enqueue)), 2, 1000, F32, NORMAL, (12, 0)))
    assert not reads
