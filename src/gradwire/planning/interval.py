"""COVAP's interval from the communication-to-computation ratio (Meng et al. 2023, section III-C)."""

from __future__ import annotations

import math


def interval_for(ccr: float, decimals: int = 1) -> int:
    """I = ⌈CCR⌉ after rounding to `decimals`, at least 1.

    Rounding first is how the paper's own table comes out: VGG-19's 842/210 = 4.01 was run at 4.

    >>> [interval_for(ccr) for ccr in (2.07, 3.06, 3.5, 4.01, 0.3)]
    [3, 4, 4, 4, 1]
    """
    return max(1, math.ceil(round(ccr, decimals)))
