"""The function that DDP calls.

DDP looks at its signature: the second parameter must be called `bucket`, and annotations must not be
postponed, so this module stands alone.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

Take: TypeAlias = Callable[[GradBucket], torch.futures.Future[torch.Tensor]]


def gradwire_hook(state: Take, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand a bucket over; the future is set when the step has its verdict."""
    return state(bucket)
