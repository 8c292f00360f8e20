"""Where lanes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gradwire.planning.cuts import even_cuts, phased_cuts, ramped_cuts

SIZES = (0, 1, 7, 1000, 16_384, 100_003, 11_000_000, 143_667_240)


def _parts(numel: int, cuts: tuple[int, ...]) -> list[int]:
    bounds = [0, *cuts, numel]
    return [b - a for a, b in pairwise(bounds)]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("unit", [1000, 1 << 18])
def test_even_units_differ_by_one_element_at_most_and_none_is_too_large(numel: int, unit: int) -> None:
    parts = _parts(numel, even_cuts((numel,), unit))
    assert max(parts) <= unit
    assert max(parts) - min(parts) <= 1
    assert sum(parts) == numel


@pytest.mark.parametrize("numel", SIZES)
def test_ramped_units_hold_8_kilobytes_to_25_megabytes_of_float32(numel: int) -> None:
    parts = _parts(numel, ramped_cuts((numel,)))
    assert max(parts) <= 25 << 18
    assert len(parts) == 1 or min(parts) >= (1 << 12) // 2
    assert sum(parts) == numel


def test_ramped_units_are_small_where_they_show() -> None:
    first, *middle, last = _parts(11_000_000, ramped_cuts((11_000_000,)))
    assert last == pytest.approx(min(first, *middle, last), abs=1), "nothing is left to hide it behind"
    assert first < max(middle), "nothing is under way before it"


@pytest.mark.parametrize("numel", [100_003, 11_000_000])
@pytest.mark.parametrize("interval", [1, 2, 3, 4, 7, 20])
def test_every_phase_carries_the_same_within_a_hundredth(numel: int, interval: int) -> None:
    parts = _parts(numel, phased_cuts((numel,), interval))
    assert len(parts) % interval == 0
    phases = [sum(parts[first::interval]) for first in range(interval)]
    assert max(phases) <= 1.01 * min(phases)


def test_phased_units_are_spread_over_the_whole_lane() -> None:
    numel, interval = 11_000_000, 4
    cuts = phased_cuts((numel,), interval)
    starts = [0, *cuts][1::interval]
    assert starts[0] < numel / 16
    assert starts[-1] > numel * 15 / 16 - numel / 16
