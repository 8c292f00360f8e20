"""Where flat buffers are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from gradwire.planning.boundaries import (
    Announced,
    even_boundaries,
    fitted_boundaries,
    phased_boundaries,
    ramped_boundaries,
)
from gradwire.planning.collectives import Transfer, algorithm_of
from gradwire.planning.costs import NOMINAL, NOMINAL_ELEMENT_S
from tests.support.looped import looped

SIZES = (0, 1, 7, 1000, 16_384, 100_003, 11_000_000, 143_667_240)


def _parts(numel: int, boundaries: tuple[int, ...]) -> list[int]:
    bounds = [0, *boundaries, numel]
    return [b - a for a, b in pairwise(bounds)]


@looped("numel", SIZES)
@looped("unit", [1000, 1 << 18])
def test_even_units_differ_by_one_element_at_most_and_none_is_too_large(numel: int, unit: int) -> None:
    parts = _parts(numel, even_boundaries((numel,), unit))
    assert max(parts) <= unit
    assert max(parts) - min(parts) <= 1
    assert sum(parts) == numel


@looped("numel", SIZES)
def test_ramped_units_hold_8_kilobytes_to_25_megabytes_of_float32(numel: int) -> None:
    parts = _parts(numel, ramped_boundaries((numel,)))
    assert max(parts) <= 25 << 18
    assert len(parts) == 1 or min(parts) >= (1 << 12) // 2
    assert sum(parts) == numel


def test_ramped_units_are_small_where_they_show() -> None:
    first, *middle, last = _parts(11_000_000, ramped_boundaries((11_000_000,)))
    assert last == pytest.approx(min(first, *middle, last), abs=1), "nothing is left to hide it behind"
    assert first < max(middle), "nothing is under way before it"


def _sending(verbs: Sequence[str], bytes_per_element: float, numel: int) -> Announced:
    """Every element takes so many bytes in each of `verbs`."""
    return lambda start: [Transfer(verb, bytes_per_element * (numel - start)) for verb in verbs]


@looped("numel", SIZES)
@looped("world", [1, 2, 4, 64])
def test_fitted_units_make_up_the_flat_buffer_and_none_is_above_25_megabytes_of_float32(
    numel: int, world: int
) -> None:
    parts = _parts(numel, fitted_boundaries(numel, _sending(["all_reduce"], 4.0, numel), world))
    assert max(parts) <= 25 << 18
    assert sum(parts) == numel
    assert min(parts) > 0 or numel == 0


@looped("verbs", [["all_reduce"], ["all_to_all", "all_gather"], ["shift"]])
@looped("world", [2, 3, 4, 16])
def test_the_last_unit_takes_longer_than_its_messages_and_half_of_it_would_not(
    verbs: Sequence[str], world: int
) -> None:
    messages_s = sum(algorithm_of(verb).messages(world) for verb in verbs) * NOMINAL.alpha_s

    def work_s(numel: int) -> float:
        sent = sum(algorithm_of(verb).volume(world) for verb in verbs) * numel * NOMINAL.beta_s
        return numel * NOMINAL_ELEMENT_S + sent

    counts = set()
    for numel in (1000, 20_000, 50_000, 100_000, 200_000, 400_000, 10_000_000):
        parts = _parts(numel, fitted_boundaries(numel, _sending(verbs, 1.0, numel), world))
        counts.add(len(parts))
        assert len(parts) == 1 or work_s(parts[-1]) > messages_s
        # Where edges are rounded, half a unit may be an element more or less.
        assert len(parts) >= 5 or work_s(parts[-1] // 2 - 1) <= messages_s
    assert counts >= {1, 5}, "both ends of the rule are among these sizes"


def test_a_few_kilobytes_in_two_rounds_are_one_unit() -> None:
    # A transformer of 1.2 M elements, its factors of rank 1 in float32, four ranks.
    assert fitted_boundaries(1_200_000, lambda _: [Transfer("all_reduce", 20e3)] * 2, 4) == ()


def test_fitted_units_are_small_where_they_show() -> None:
    numel = 11_000_000
    first, *middle, last = _parts(numel, fitted_boundaries(numel, _sending(["all_reduce"], 4.0, numel), 2))
    assert last == pytest.approx(min(first, *middle, last), abs=1), "nothing is left to hide it behind"
    assert first < max(middle), "nothing is under way before it"


@looped("numel", [100_003, 11_000_000])
@looped("interval", [1, 2, 3, 4, 7, 20])
def test_every_phase_carries_the_same_within_a_hundredth(numel: int, interval: int) -> None:
    parts = _parts(numel, phased_boundaries((numel,), interval))
    assert len(parts) % interval == 0
    phases = [sum(parts[first::interval]) for first in range(interval)]
    assert max(phases) <= 1.01 * min(phases)


def test_phased_units_are_spread_over_the_whole_flat_buffer() -> None:
    numel, interval = 11_000_000, 4
    boundaries = phased_boundaries((numel,), interval)
    starts = [0, *boundaries][1::interval]
    assert starts[0] < numel / 16
    assert starts[-1] > numel * 15 / 16 - numel / 16
