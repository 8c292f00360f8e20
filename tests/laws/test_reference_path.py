"""Tensors that the fast kernels do not take, such as those of an accelerator, get the same results."""

from __future__ import annotations

import inspect

import pytest
import torch

from gradwire.kernels import dispatch
from gradwire.kernels.dispatch import Kernels
from tests.laws.cases import EXCHANGES, F32, ExchangeCase
from tests.laws.rows import Row, perform
from tests.support.gradients import KINDS
from tests.support.looped import looped
from tests.support.twins import CONTRACTS, cpu


def decline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function for the CPU takes a tensor any more, neither where contracts are called nor as chosen."""
    monkeypatch.setattr(dispatch, "fits", lambda _arguments, _types: False)
    for name in CONTRACTS:
        if hasattr(cpu, name):
            monkeypatch.setattr(getattr(cpu, name), "types", (), raising=False)
    monkeypatch.setattr(dispatch, "kernels_for", Kernels)


def test_nothing_but_the_contracts_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    decline(monkeypatch)
    chosen = Kernels(torch.device("cpu"), torch.float32)
    assert all(inspect.unwrap(chosen[each]) is each.plain for each in CONTRACTS.values())


@looped("case", EXCHANGES, by=lambda case: case.kind, few=1)
def test_the_reference_gives_what_the_kernels_give(
    case: ExchangeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(case, 3, 4097, F32, KINDS[1], (12, 0))
    fast = perform(row)
    decline(monkeypatch)
    slow = perform(row)
    largest = max(float(x.abs().max()) for x in row.inputs())
    for here, there in zip(fast.ranks, slow.ranks, strict=True):
        assert here.rounds == there.rounds
        for a, b in ((here.mean, there.mean), (here.unsent, there.unsent)):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6 * largest)
