"""Sources bring gradients to the engine and take the means back: one for each kind of model."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.sources.source import Source


def source_of(model: nn.Module) -> Source:
    """What brings the gradients of `model`. Raises `ValueError` where nothing can."""
    # A source is loaded with the models that need it.
    from gradwire.sources.ddp.source import DDPBuckets

    if isinstance(model, DistributedDataParallel):
        return DDPBuckets(model)
    raise ValueError(
        f"need a DistributedDataParallel module, got {type(model).__name__}; wrap the model first"
    )
