"""The function that DDP calls.

DDP looks at its signature: the second parameter must be called `bucket`, and annotations must not be
postponed, so this module stands alone.
"""

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from gradwire.sources.ddp.session import Session


def gradwire_hook(state: Session, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand a bucket to the worker; the future is set when the step has its verdict."""
    return state.take(bucket)
