"""Sources bring gradients to the engine and take the means back: one for each kind of model."""

from torch import nn

from gradwire.sources.source import Source
from gradwire.unwrapping import ddp_of, replicated_in


def source_of(model: nn.Module, replicas: object = None) -> Source:
    """The source that brings the gradients of `model`; `replicas` as for `attach`.

    Raises `ValueError` where nothing can, without asking other ranks: a script wraps alike on all of them.
    """
    # A source is loaded with the models that need it.
    if replicas is None:
        from gradwire.sources.ddp.source import DDPBuckets

        return DDPBuckets(ddp_of(model))
    from gradwire.sources.plain import PlainParameters, group_in

    inner, group = replicated_in(model), group_in(replicas)
    from gradwire.sources.sharded import ShardedParameters, is_sharded

    return ShardedParameters(inner, group) if is_sharded(inner) else PlainParameters(inner, group)
