"""Codes that are too long are sent in full: equations 5 to 7 of GComp (Li, X. et al. 2024, section 4.3)."""

from __future__ import annotations

from math import log2
from random import Random

import pytest

CASES = 300  # of equations 5, 6 and 7


def lengths(often: float, seldom: float, rare: float, moved: float, full_bits: float) -> tuple[float, float]:
    """Mean bits by plain Huffman codes and with long ones sent in full, equations 5 and 6.

    The first three arguments are the probabilities of the sets S1, S2 and S3 in the table; `moved` has gone
    from S1 to S3. All codes of a set have the length −log2 of its probability.
    """
    plain = -(often - moved) * log2(often) - seldom * log2(seldom) - (rare + moved) * log2(rare)
    return plain, -(often - moved) * log2(often) + (seldom + rare + moved) * full_bits


def by_equation_7(seldom: float, rare: float, moved: float, full_bits: float) -> float:
    """What sending long codes in full adds to the mean length."""
    r = seldom / rare
    return ((r + 1 + moved / rare) * (full_bits + log2(rare)) + r * log2(r)) * rare


def test_long_codes_sent_in_full_are_shorter_where_they_have_become_frequent() -> None:
    draw = Random(7)
    for _ in range(CASES):
        longest = draw.choice((8, 12))
        full_bits = longest + 8.0  # equation 2: the special code, and 8 bits of the exponent
        rare = 2.0 ** -(full_bits + draw.uniform(0.5, 10))  # codes of S3 are longer than that
        seldom = 2.0 ** -draw.uniform(longest, full_bits)
        often, differences = 1 - seldom - rare, []
        for moved in (0.0, 0.01, 0.1, 0.5, 0.9):
            plain, full = lengths(often, seldom, rare, moved, full_bits)
            assert full - plain == pytest.approx(by_equation_7(seldom, rare, moved, full_bits), abs=1e-12)
            differences.append(full - plain)
        assert differences == sorted(differences, reverse=True)
        assert differences[-1] < 0
