"""Sources bring gradients to the engine and take the means back: one for each kind of model."""

from torch import nn

from gradwire.sources.source import Source
from gradwire.unwrapping import ddp_of


def source_of(model: nn.Module) -> Source:
    """What brings the gradients of `model`. Raises `ValueError` where nothing can."""
    # A source is loaded with the models that need it.
    from gradwire.sources.ddp.source import DDPBuckets

    return DDPBuckets(ddp_of(model))
