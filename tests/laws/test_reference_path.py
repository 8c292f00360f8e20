"""Tensors that the fast kernels do not take, such as those of an accelerator, get the same results."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.laws.cases import EXCHANGES, F32, ExchangeCase
from tests.laws.inputs import KINDS
from tests.laws.rows import Row, perform


@pytest.fixture
def no_fast_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every entrance of the kernels finds that nothing is fast; returns which ones there are."""
    entrances = [
        name for name in sys.modules if name.startswith("gradwire.") and hasattr(sys.modules[name], "is_fast")
    ]
    for name in entrances:
        monkeypatch.setattr(sys.modules[name], "is_fast", lambda *_tensors: False)
    for name in list(sys.modules):
        if name.startswith("gradwire.") and hasattr(sys.modules[name], "is_native"):
            monkeypatch.setattr(sys.modules[name], "is_native", lambda *_tensors: False)
    return entrances


def test_every_entrance_asks_whether_it_is_fast(no_fast_kernels: list[str]) -> None:
    assert {
        f"gradwire.kernels.{name}"
        for name in ("chunks", "folding", "topk", "places", "threshold", "sketches")
    } <= set(no_fast_kernels)


@pytest.mark.parametrize("case", EXCHANGES, ids=str)
def test_the_reference_gives_what_the_kernels_give(
    case: ExchangeCase, request: pytest.FixtureRequest
) -> None:
    row = Row(case, 3, 4097, F32, KINDS[1], (12, 0))
    fast = perform(row)
    request.getfixturevalue("no_fast_kernels")
    slow = perform(row)
    largest = max(float(x.abs().max()) for x in row.inputs())
    for here, there in zip(fast.ranks, slow.ranks, strict=True):
        assert here.rounds == there.rounds
        for a, b in ((here.mean, there.mean), (here.unsent, there.unsent)):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6 * largest)
