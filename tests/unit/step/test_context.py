"""Random numbers follow from where and when, and from nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.unit.context import ExchangeContext

HERE = ExchangeContext(step=3, unit=2, rank=1, world=4, seed=5, flat_buffer=1)


def draw(generator: torch.Generator) -> list[int]:
    return torch.randint(2**62, (4,), generator=generator).tolist()


def test_shared_generator_is_the_same_on_all_ranks() -> None:
    assert draw(HERE.shared()) == draw(replace(HERE, rank=0).shared())


def test_private_generator_differs_between_ranks_and_from_the_shared_one() -> None:
    draws = [draw(replace(HERE, rank=rank).private()) for rank in range(4)] + [draw(HERE.shared())]
    assert len(set(map(tuple, draws))) == 5


@pytest.mark.parametrize("field", ["step", "unit", "seed", "flat_buffer"])
def test_every_coordinate_changes_the_numbers(field: str) -> None:
    there = replace(HERE, **{field: getattr(HERE, field) + 1})
    assert draw(HERE.shared()) != draw(there.shared())
    assert draw(HERE.private()) != draw(there.private())


def test_coordinates_do_not_run_into_each_other() -> None:
    one, other = ExchangeContext(1, 23, 0, 1), ExchangeContext(12, 3, 0, 1)
    assert draw(one.shared()) != draw(other.shared())


def test_each_call_starts_anew() -> None:
    assert draw(HERE.shared()) == draw(HERE.shared())


def test_numbers_stay_what_they_were() -> None:
    # A change here changes what every resumed run draws.
    assert draw(ExchangeContext(0, 0, 0, 1).shared())[0] == 2530150324704753581


def test_global_generator_is_not_touched() -> None:
    before = torch.get_rng_state()
    draw(HERE.shared())
    draw(HERE.private())
    assert torch.equal(torch.get_rng_state(), before)
