"""Counter-based random words."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel


@kernel
def random_word(index: Any, low: Any, high: Any) -> Any:
    """Random uint32 for an `index` and the two halves of a key, uint32 each; equal to `random_words`."""
    # Every step is cut to 32 bits at once: what Numba widens to 64 would halve the lanes of a vector.
    h = np.uint32(np.uint32(index) * np.uint32(0x9E3779B1) + low)
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32(h ^ high)
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))
