"""COVAP's options: how units are sharded, and what is fed back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from gradwire.memory import NoMemory, Residual
from gradwire.planning.boundaries import phased_boundaries
from gradwire.planning.costs import BackwardTiming, Line, Link, Network
from gradwire.planning.facts import Facts
from gradwire.planning.step_time import ready_of_element
from gradwire.recipes import Composition, recipe
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.unit.parameters import ParameterSpec
from tests.support.looped import looped
from tests.support.planning_problems import imbalance

# VGG-19's six buckets in the paper (table V), in the order in which they become ready.
VGG_19 = (4101096, 16781312, 107480576, 7079424, 7669760, 555072)


def units(text: str, sizes: tuple[int, ...] = VGG_19) -> list[int]:
    """Elements of each unit of a flat buffer with parameters of `sizes`."""
    built = recipe(text).build()
    specs = [ParameterSpec(f"p{i}", (size,), torch.float32, size) for i, size in enumerate(sizes)]
    flat_buffer = FlatBuffer(0, specs, built.exchange, built.boundaries(specs, 2), torch.device("meta"))
    return [unit.numel for unit in flat_buffer.units]


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


@looped(("sharding", "worst"), [("off", 2.99), ("paper", 1.08), ("balanced", 1.01)])
def test_sharding_balances_what_steps_carry(sharding: str, worst: float) -> None:
    # Without it a step carries up to 2.99 of the mean, with the paper's rule 1.08.
    found = units(f"covap(interval=4, sharding={sharding})")
    assert imbalance(found, 4) == pytest.approx(worst, abs=0.011)


def test_balanced_units_come_in_as_many_as_the_interval() -> None:
    found = units("covap(interval=4)")
    assert len(found) % 4 == 0
    assert all(abs(a - b) <= 1 for i in range(0, len(found), 4) for a, b in pairwise(found[i : i + 4]))


def test_segments_end_where_they_are_told_to() -> None:
    assert units("covap(interval=2, edges=(0.5, 0.75))", (100, 100)) == [50, 50, 25, 25, 25, 25]


def vgg_like() -> BackwardTiming:
    """Most elements are ready at once, and the rest take most of the time."""
    ready_s = tuple(0.05 * (number + 1) for number in range(20))
    return BackwardTiming(0.5, ready_s, (8_000_000, *[100_000] * 19), 1.0)


def decided(facts: Facts, text: str = "covap") -> Composition:
    decision = recipe(text).build().next
    assert decision is not None
    return decision.decide(facts)


def test_measured_ready_times_place_the_segments() -> None:
    network = Network(Link(alpha_s=1e-3, beta_s=4.0 / 59.4e6))  # a dense all-reduce takes 4 s and latencies
    facts = Facts(backward_s=1.0, allreduce_s=4.0, world=4, backward=vgg_like(), network=network)
    chosen = decided(facts)
    assert chosen.text.startswith("covap(interval=4, edges=(0.")
    again = recipe(chosen.text).build()
    boundaries = [each.cutter((9_900_000,)) for each in (chosen, again)]
    assert boundaries[0] == boundaries[1]
    spread = phased_boundaries((9_900_000,), 4)
    line = Line(6e-3, 1.5 * 4.0 * network.link.beta_s)
    measured_s, spread_s = (worst_end(vgg_like(), each, line) for each in (boundaries[0], spread))
    assert measured_s <= spread_s


def worst_end(backward: BackwardTiming, boundaries: Sequence[int], line: Line) -> float:
    """When the last unit of the slowest of four steps has been sent, one unit after the other."""
    ready_s, total = ready_of_element(backward), sum(backward.numel)
    bounds, ends = [0, *boundaries, total], [0.0] * 4
    for number, (start, stop) in enumerate(pairwise(bounds)):
        phase = number % 4
        ends[phase] = max(ends[phase], ready_s(stop)) + line(stop - start)
    return max(ends)


def test_segments_that_are_given_or_that_sharding_places_are_not_measured() -> None:
    network = Network(Link(alpha_s=1e-3, beta_s=1e-7))
    facts = Facts(backward_s=1.0, allreduce_s=2.0, world=4, backward=vgg_like(), network=network)
    for text in ("edges=(0.5,)", "edges=()", "sharding='paper'", "sharding='off'"):
        assert decided(facts, f"covap({text})").text == f"covap(interval=2, {text})"


def test_without_ready_times_segments_are_spread() -> None:
    assert decided(Facts(backward_s=1.0, allreduce_s=4.0, world=4)).text == "covap(interval=4)"


@looped(
    ("text", "memory"),
    [
        ("covap(interval=4)", Residual(0.5, 0.1, 50)),
        ("covap(interval=8)", Residual(0.5, 0.1, 50)),
        ("covap(interval=9)", Residual(0.2, 0.1, 100)),
        ("covap(interval=4, init_value=0.3, ascend_steps=7, ascend_range=0.2)", Residual(0.3, 0.2, 7)),
        ("covap(interval=4, init_value=0.0)", Residual(0.0, 0.1, 50)),
        ("covap(interval=9, ascend_steps=20)", Residual(0.2, 0.1, 20)),
        ("covap(interval=9, ascend_range=0.05)", Residual(0.2, 0.05, 100)),
        ("covap(interval=4, feedback=full)", Residual()),
        ("covap(interval=4, feedback=none)", NoMemory(as_arrived=True)),
    ],
)
def test_feedback(text: str, memory: object) -> None:
    built = recipe(text).build()
    assert built.exchange.memory == memory


@looped(
    ("text", "canonical"),
    [
        ("covap(interval=4)", "covap(interval=4)"),
        ("covap(interval=4, feedback=schedule, sharding=balanced, unit_mb=25.0)", "covap(interval=4)"),
        (
            "covap(sharding=paper, interval=4, feedback=none, unit_mb=1.5)",
            "covap(interval=4, sharding='paper', feedback='none', unit_mb=1.5)",
        ),
        ("covap(interval=1, feedback=full)", "covap(interval=1, feedback='full')"),
        ("covap(interval=3, order=random)", "covap(interval=3)"),
        ("covap(interval=3, order=paper)", "covap(interval=3, order='paper')"),
        (
            "covap(interval=4, ascend_range=0.2, init_value=0, ascend_steps=9, ccr_decimals=0)",
            "covap(interval=4, init_value=0, ascend_steps=9, ascend_range=0.2)",
        ),
    ],
)
def test_the_text_says_what_is_not_as_by_default_and_parses_back(text: str, canonical: str) -> None:
    built = recipe(text).build()
    assert built.text == canonical
    again = recipe(canonical).build()
    assert again.text == canonical
    assert again.exchange == built.exchange


@looped(("ccr", "decimals", "interval"), [(2.4, 0, 2), (2.04, 1, 2), (2.04, 2, 3)])
def test_decimals_of_the_measured_ratio_decide_the_interval(ccr: float, decimals: int, interval: int) -> None:
    facts = Facts(backward_s=1.0, allreduce_s=ccr, world=4)
    chosen = decided(facts, f"covap(ccr_decimals={decimals}, init_value=0.7)")
    assert chosen.text == f"covap(interval={interval}, init_value=0.7)"
    assert chosen.exchange.memory == Residual(0.7, 0.1, 50)


@looped(
    ("text", "words"),
    [
        ("covap(sharding=some)", "sharding='some' is none of balanced, paper, off"),
        ("covap(feedback=1)", "feedback=1 is none of schedule, full, none"),
        ("covap(order=some)", "order='some' is none of random, paper"),
        ("covap(unit_mb=0)", "unit_mb=0 must be positive"),
        ("covap(edges=(0.5, 0.25))", "must ascend within 0 … 1"),
        ("covap(edges=[0.5, 1.5])", "must ascend within 0 … 1"),
        ("covap(init_value=1.5)", "init_value=1.5 is outside 0 … 1"),
        ("covap(ascend_steps=0)", "ascend_steps=0 must be a whole number"),
        ("covap(ascend_steps=1.5)", "ascend_steps=1.5 must be a whole number"),
        ("covap(ascend_range=-0.1)", "ascend_range=-0.1 must not be negative"),
        ("covap(ccr_decimals=-1)", "ccr_decimals=-1 must be a whole number"),
        ("covap(feedback=full, init_value=0.5)", "feedback='full' has no schedule"),
    ],
)
def test_options_outside_their_range_raise(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe(text)
