"""Bits of tensors and generators, to compare."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def global_generators() -> tuple[Any, ...]:
    """The state of every generator that a user may have seeded."""
    name, keys, *rest = np.random.get_state()
    return bits(torch.get_rng_state()), name, keys.tobytes(), rest, random.getstate()


def bits(tensor: Tensor) -> bytes:
    """Bit patterns, so that NaN equals itself and -0.0 is not 0.0."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
