"""Residual memory: the coefficient's schedule, and the fold it asks for."""

from __future__ import annotations

import pytest
import torch

from gradwire.memory import UNSENT, Gradients, Residual

COVAP_SMALL = Residual(start=0.5, rise=0.1, every=50)
COVAP_LARGE = Residual(start=0.2, rise=0.1, every=100)


@pytest.mark.parametrize(
    ("memory", "step", "coefficient"),
    [
        (Residual(), 0, 1.0),
        (Residual(), 10**9, 1.0),
        (COVAP_SMALL, 0, 0.5),
        (COVAP_SMALL, 49, 0.5),
        (COVAP_SMALL, 50, 0.6),
        (COVAP_SMALL, 120, 0.7),
        (COVAP_SMALL, 199, 0.8),
        (COVAP_SMALL, 249, 0.9),
        (COVAP_SMALL, 250, 1.0),
        (COVAP_SMALL, 10_000, 1.0),
        (COVAP_LARGE, 99, 0.2),
        (COVAP_LARGE, 100, 0.3),
        (COVAP_LARGE, 799, 0.9),
        (COVAP_LARGE, 800, 1.0),
        (Residual(start=0.0, rise=0.5, every=1), 1, 0.5),
    ],
)
def test_coefficient(memory: Residual, step: int, coefficient: float) -> None:
    assert memory.coefficient(step) == coefficient


def test_fold_applies_the_coefficient_of_the_step_and_the_scale_of_the_gradient() -> None:
    working, committed, grad = torch.empty(2), torch.tensor([2.0, 4.0]), torch.tensor([8.0, 16.0])
    COVAP_SMALL.fold({UNSENT: working}, {UNSENT: committed}, Gradients.of(grad, 0.25), step=49, world=3)
    assert working.tolist() == [3.0, 6.0]


def test_fold_leaves_memory_and_gradient_alone() -> None:
    working, committed, grad = torch.empty(2), torch.tensor([2.0, 4.0]), torch.tensor([8.0, 16.0])
    Residual().fold({UNSENT: working}, {UNSENT: committed}, Gradients.of(grad), step=0, world=3)
    assert committed.tolist() == [2.0, 4.0]
    assert grad.tolist() == [8.0, 16.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"start": 1.1}, "start=1.1"), ({"start": -0.1}, "start=-0.1"), ({"every": 0}, "every=0")],
)
def test_options_outside_their_range_raise(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Residual(**options)
