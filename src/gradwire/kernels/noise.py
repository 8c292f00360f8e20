"""Random words by counting: kernels draw noise where they need it, and nobody stores it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference_noise


def random_words(key: int, count: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Uniform words (count,) int64, 0 … 2^32 - 1, of a 64-bit `key` and the indices start, start + 1, …

    Indices count modulo 2^32: elements so far apart share their noise. Not for secrets.

    >>> random_words(5, 2).tolist() == [random_words(5, 1, start=i).item() for i in (0, 1)]
    True
    """
    if torch.device(device).type != "cpu":
        return reference_noise.random_words(key, start, count, device)
    words = np.empty(count, np.uint32)
    low, high = reference_noise.halves(key)
    cpu.random_words(np.uint32(low), np.uint32(high), start, words)
    return torch.from_numpy(words.astype(np.int64))
