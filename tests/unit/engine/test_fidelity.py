"""What recipes deliver of recorded gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.arena import ParameterSpec
from gradwire.engine.fidelity import Interrupted, carried, fidelity
from gradwire.recipes import recipe

WORLD, STEPS, SHAPE = 3, 6, (32, 64)
SPECS = (ParameterSpec("w", SHAPE, torch.float32, 2048),)


def _recorded(scale: float = 1.0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [scale * torch.randn(2048, generator=generator) for _rank in range(WORLD)] for _step in range(STEPS)
    ]


def _kept(text: str) -> float:
    return fidelity(recipe(text).build(), SPECS, _recorded())


def test_dense_delivers_all_up_to_the_rounding_of_a_mean() -> None:
    # Each of the three products and two sums is rounded once: 5 u, relative to their magnitudes.
    assert 1.0 - 5 * torch.finfo(torch.float32).eps < _kept("dense") <= 1.0


def test_more_bits_more_elements_and_more_ranks_deliver_more() -> None:
    for family in (
        ("fp16", "int8", "int4"),
        ("topk(ratio=0.3)", "topk(ratio=0.1)", "topk(ratio=0.01)"),
        ("powersgd(rank=16)", "powersgd(rank=4)", "powersgd(rank=1)"),
        ("covap(interval=2)", "covap(interval=4)"),
    ):
        found = [_kept(text) for text in family]
        assert found == sorted(found, reverse=True)
        assert all(0.0 < each < 1.0 for each in found)


def test_a_memory_delivers_late_what_one_step_keeps() -> None:
    """One half of the elements, of 1.5, then the other, of 1, of which there are two by then."""
    constant = torch.ones(2048)
    constant[::2] = 1.5
    exact = recipe("topk(ratio=0.5)").build()
    one, two = ([[constant] * WORLD] * steps for steps in (1, 2))
    first = fidelity(exact, SPECS, one)
    # ‖ones‖² is 1024, and ‖x‖² is 1024·(1 + 2.25).
    assert first == pytest.approx(1.0 - (1.0 / 3.25) ** 0.5, rel=1e-6)
    assert fidelity(exact, SPECS, two) > first


def test_what_never_arrives_counts_as_nothing_kept_and_zeros_as_kept() -> None:
    assert fidelity(recipe("qsgd(bits=2)").build(), SPECS, _recorded()) == 0.0, "errs by more than there is"
    assert fidelity(recipe("int4").build(), SPECS, _recorded(0.0)) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("text", ["fp16", "int4", "topk(ratio=0.1)", "powersgd(rank=4)", "efsignsgd"])
def test_parameters_of_other_types_keep_about_as_much(text: str, dtype: torch.dtype) -> None:
    recorded = [[each.to(torch.promote_types(torch.float32, dtype)) for each in step] for step in _recorded()]
    specs = [replace(spec, dtype=dtype) for spec in SPECS]
    # 16 bits of a value round it by 2^-9 at most.
    assert fidelity(recipe(text).build(), specs, recorded) == pytest.approx(_kept(text), abs=2**-8)


def test_bytes_are_those_at_the_verbs() -> None:
    means, sent = carried(recipe("dense").build(), SPECS, _recorded())
    assert len(means) == STEPS
    assert sent == pytest.approx(STEPS * 2 * (WORLD - 1) / WORLD * 4 * 2048, rel=1e-12)


def test_it_ends_when_it_is_not_needed_any_more() -> None:
    asked = []

    def is_over() -> bool:
        asked.append(None)
        return len(asked) > WORLD

    with pytest.raises(Interrupted):
        fidelity(recipe("topk(ratio=0.01)").build(), SPECS, _recorded(), is_over=is_over)
    assert len(asked) <= 2 * WORLD, "no rank begins the third step"
