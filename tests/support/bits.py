"""Bits of tensors and generators, to compare."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.agreement.agree import checksum
from gradwire.step.optimizers import local

Checksums = tuple[int, ...]


def global_generators() -> tuple[Any, ...]:
    """The state of every generator that a user may have seeded."""
    name, keys, *rest = np.random.get_state()
    return bits(torch.get_rng_state()), name, keys.tobytes(), rest, random.getstate()


def bits(tensor: Tensor) -> bytes:
    """Bit patterns, so that NaN equals itself and -0.0 is not 0.0."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def checksums(tensors: Iterable[Tensor]) -> Checksums:
    """One for each tensor; of a sharded one that of the part which is here. For what scenes return."""
    return tuple(checksum(local(each)) for each in tensors)
