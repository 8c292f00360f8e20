"""Norms of what a step adds and of what was left, by parameter."""

from __future__ import annotations

import pytest
import torch

from gradwire.exchange.compose import remember
from gradwire.exchange.dense import dense
from gradwire.measure.norms import Weighing
from gradwire.memory import UNSENT, Gradients, LowPass, Memory, Residual
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.unit.parameters import ParameterSpec

CPU = torch.device("cpu")
SIZES = (5, 3, 9)


@pytest.mark.parametrize(
    ("memory", "coefficient"), [(Residual(), 1.0), (Residual(start=0.5), 0.5), (LowPass(0.25), 1.0)]
)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("boundaries", [(), (2, 6, 8)])
def test_the_gradient_is_found_again_in_an_error_fed_one(
    memory: Memory, coefficient: float, kept: torch.dtype, boundaries: tuple[int, ...]
) -> None:
    specs = [ParameterSpec(str(n), (size,), torch.float32, size) for n, size in enumerate(SIZES)]
    flat_buffer = FlatBuffer(0, specs, remember(dense(), memory), boundaries, CPU, kept)
    left, gradient = torch.randn(sum(SIZES)), torch.randn(sum(SIZES))
    flat_buffer.committed[UNSENT].copy_(left)
    left = flat_buffer.committed[UNSENT].float()
    flat_buffer.compensate(Gradients(gradient, flat_buffer.pieces), 0, 2)
    weighing = Weighing(len(SIZES), CPU, memory.weight)
    for unit in flat_buffer.units:
        here = slice(unit.start, unit.stop)
        sizes = [part.numel for part in unit.parts]
        first = [slot.spec.name for slot in flat_buffer.slots].index(unit.parts[0].name)
        unsent = flat_buffer.committed[UNSENT][here]
        weighing.add(flat_buffer.x[here], unsent, coefficient=coefficient, first=first, sizes=sizes)
    for found, wanted in zip(weighing.norms(), (gradient, left * memory.weight), strict=True):
        norms = [float(each.norm()) for each in wanted.split_with_sizes(SIZES)]
        torch.testing.assert_close(found, torch.tensor(norms, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_without_a_memory_all_is_gradient() -> None:
    weighing = Weighing(1, CPU)
    weighing.add(torch.tensor([3.0, 4.0]), None, coefficient=1.0, first=0, sizes=(2,))
    assert weighing.norms().tolist() == [[5.0], [0.0]]
