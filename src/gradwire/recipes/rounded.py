"""What the recipes in few bits share: an all-reduce in codes, with or without error feedback."""

from gradwire.codec import Codec
from gradwire.exchange import forget, remember, scatter_reduce
from gradwire.recipes.base import Composition


def rounded(codec: Codec, feedback: bool) -> Composition:
    """All-reduce in the codes of `codec`; what they drop is remembered, or dropped for good.

    Even without feedback it lives in a lane: blocks follow parameters, and never DDP's buckets.

    >>> from gradwire.codec import truncate
    >>> rounded(truncate(18), feedback=False).exchange.memory
    Forgetful()
    """
    if feedback:
        return Composition(remember(scatter_reduce(codec)))
    return Composition(forget(scatter_reduce(codec, second_stage=False)))
