"""Tensors that the fast kernels do not take, such as those of an accelerator, get the same results."""

from __future__ import annotations

import pytest
import torch

from tests.laws.cases import EXCHANGES, F32, ExchangeCase
from tests.laws.rows import Row, perform
from tests.support.gradients import KINDS
from tests.support.looped import looped
from tests.support.twins import CONTRACTS, cpu, files


def decline(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """No function for the CPU takes a tensor; returns in which modules they ask."""
    asking = set()
    for name, module in files("gradwire.kernels.cpu").items():
        for question in ("is_fast", "is_native"):
            if hasattr(module, question):
                monkeypatch.setattr(module, question, lambda *_tensors: False)
                asking.add(name)
    return asking


def test_all_functions_on_tensors_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    draws_and_votes = {"sample_indices", "stratified_indices", "tally"}
    twins = [getattr(cpu, name) for name in CONTRACTS.keys() - draws_and_votes if hasattr(cpu, name)]
    assert {twin.__module__.rsplit(".", 1)[1] for twin in twins} <= decline(monkeypatch)


@looped("case", EXCHANGES, by=lambda case: case.kind, few=4)
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
