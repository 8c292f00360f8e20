"""Tensors that the fast kernels do not take, such as those of an accelerator, get the same results."""

from __future__ import annotations

import sys

import pytest
import torch

from gradwire.kernels import cpu
from gradwire.kernels.subjects import SUBJECTS
from tests.laws.cases import EXCHANGES, F32, ExchangeCase
from tests.laws.rows import Row, perform
from tests.support.gradients import KINDS

NAMES = [name for name in SUBJECTS if hasattr(cpu, name)]


@pytest.fixture
def declined(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """No function for the CPU takes a tensor; returns in which modules they ask."""
    asking = set()
    assert all(callable(getattr(cpu, name)) for name in NAMES)  # which imports their files
    for name, module in list(sys.modules.items()):
        for question in ("is_fast", "is_native"):
            if name.startswith(cpu.__name__ + ".") and hasattr(module, question):
                monkeypatch.setattr(module, question, lambda *_tensors: False)
                asking.add(name.rsplit(".", 1)[1])
    return asking


def test_all_functions_on_tensors_decline(declined: set[str]) -> None:
    draws_and_votes = {"random_words", "sample_indices", "stratified_indices", "tally"}
    files = {getattr(cpu, name).__module__.rsplit(".", 1)[1] for name in set(NAMES) - draws_and_votes}
    assert files <= declined


@pytest.mark.parametrize("case", EXCHANGES, ids=str)
def test_the_reference_gives_what_the_kernels_give(
    case: ExchangeCase, request: pytest.FixtureRequest
) -> None:
    row = Row(case, 3, 4097, F32, KINDS[1], (12, 0))
    fast = perform(row)
    request.getfixturevalue("declined")
    slow = perform(row)
    largest = max(float(x.abs().max()) for x in row.inputs())
    for here, there in zip(fast.ranks, slow.ranks, strict=True):
        assert here.rounds == there.rounds
        for a, b in ((here.mean, there.mean), (here.unsent, there.unsent)):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6 * largest)
