"""COVAP's options: how units are sharded, and what is fed back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from gradwire.arena import Lane, ParameterSpec
from gradwire.memory import Forgetful, Residual
from gradwire.plan.shard import imbalance
from gradwire.recipes import Composition, recipe

# VGG-19's six buckets in the paper (table V), in the order in which they become ready.
VGG_19 = (4101096, 16781312, 107480576, 7079424, 7669760, 555072)


def units(text: str, sizes: tuple[int, ...] = VGG_19) -> list[int]:
    """Elements of each unit of a lane with parameters of `sizes`."""
    built = recipe(text).build()
    assert isinstance(built, Composition)
    specs = [ParameterSpec(f"p{i}", (size,), torch.float32, size) for i, size in enumerate(sizes)]
    lane = Lane(0, specs, built.exchange, built.cutter, torch.device("meta"))
    return [unit.numel for unit in lane.units]


def test_without_sharding_units_are_those_of_ddp() -> None:
    assert units("covap(interval=4, sharding='off')") == list(VGG_19)
    assert units("covap(interval=4, sharding='off')", (9 << 20, 5, 7)) == [9 << 20, 12]
    assert units("covap(interval=4, sharding='off', unit_mb=1.0)", (5, 5, 11_000, 9 << 18, 1)) == [
        11_010,
        9 << 18,
        1,
    ]


def test_the_papers_rule_cuts_what_is_larger_than_the_median_into_as_many_parts_as_the_interval() -> None:
    # The median is 7374592: FC2's bucket makes two parts, FC1's fourteen before the cap.
    found = units("covap(interval=4, sharding='paper')")
    assert found == [4101096, *[8390656] * 2, *[26870144] * 4, 7079424, 7669760, 555072]


@pytest.mark.parametrize(("sharding", "worst"), [("off", 2.99), ("paper", 1.08), ("balanced", 1.01)])
def test_sharding_balances_what_steps_carry(sharding: str, worst: float) -> None:
    # Without it a step carries up to 2.99 of the mean, with the paper's rule 1.08.
    found = units(f"covap(interval=4, sharding={sharding})")
    assert imbalance(found, 4) == pytest.approx(worst, abs=0.011)


def test_balanced_units_come_in_as_many_as_the_interval() -> None:
    found = units("covap(interval=4)")
    assert len(found) % 4 == 0
    assert all(abs(a - b) <= 1 for i in range(0, len(found), 4) for a, b in pairwise(found[i : i + 4]))


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("covap(interval=4)", Residual(0.5, 0.1, 50)),
        ("covap(interval=8)", Residual(0.5, 0.1, 50)),
        ("covap(interval=9)", Residual(0.2, 0.1, 100)),
        ("covap(interval=4, feedback=full)", Residual()),
        ("covap(interval=4, feedback=none)", Forgetful()),
    ],
)
def test_feedback(text: str, memory: object) -> None:
    built = recipe(text).build()
    assert isinstance(built, Composition)
    assert built.exchange.memory == memory


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("covap(interval=4)", "covap(interval=4)"),
        ("covap(interval=4, feedback=schedule, sharding=balanced, unit_mb=25.0)", "covap(interval=4)"),
        (
            "covap(sharding=paper, interval=4, feedback=none, unit_mb=1.5)",
            "covap(interval=4, sharding='paper', feedback='none', unit_mb=1.5)",
        ),
        ("covap(interval=1, feedback=full)", "covap(interval=1, feedback='full')"),
    ],
)
def test_the_text_says_what_is_not_as_by_default_and_parses_back(text: str, canonical: str) -> None:
    built = recipe(text).build()
    assert isinstance(built, Composition)
    assert built.text == canonical
    again = recipe(canonical).build()
    assert isinstance(again, Composition)
    assert again.text == canonical


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("covap(sharding=some)", "sharding='some' is none of balanced, paper, off"),
        ("covap(feedback=1)", "feedback=1 is none of schedule, full, none"),
        ("covap(unit_mb=0)", "unit_mb=0 must be positive"),
    ],
)
def test_options_outside_their_range_raise(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe(text)
