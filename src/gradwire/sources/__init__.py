"""Sources bring gradients to the reducer and take the means back: one for each kind of model."""

import torch.distributed as dist
from torch import nn

from gradwire.sources.source import Source
from gradwire.sources.unwrap import ddp_of, is_plain, replicated_in


def source_of(model: nn.Module, replicas: object = None) -> Source:
    """Make the source that brings the gradients of `model`; `replicas` as for `attach`.

    Raises `ValueError` if there is none for such a model, without asking other ranks: a script wraps alike on
    all of them.
    """
    if replicas is None and dist.get_world_size() == 1 and is_plain(model):
        replicas = dist.group.WORLD  # frameworks do not wrap a model that one process trains alone
    # A source is loaded with the models that need it.
    if replicas is None:
        from gradwire.sources.ddp.source import DDPBuckets

        return DDPBuckets(ddp_of(model))
    from gradwire.sources.plain import PlainParameters, group_in

    inner, group = replicated_in(model), group_in(replicas)
    from gradwire.sources.sharded import ShardedParameters, is_sharded

    return ShardedParameters(inner, group) if is_sharded(inner) else PlainParameters(inner, group)
