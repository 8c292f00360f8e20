"""dense: DDP's own all-reduce, bit for bit, through gradwire's hook.

Differences from DDP: none in value. One status vote of a few bytes follows the last bucket.
"""

from dataclasses import replace

from gradwire.exchange.dense import dense as plain
from gradwire.recipes.base import Composition, Decision, register


@register
def dense() -> Composition:
    """Plain all-reduce of every gradient, in place on DDP's buckets.

    Travels: every value.
    Paper: none; what DistributedDataParallel does.
    Use when: the network is fast enough.
    """
    return Composition(plain())


def measured_for(decision: Decision) -> Composition:
    """Dense steps, measured until `decision` has its facts.

    >>> measured_for(Decision(lambda facts: dense())).text
    'dense'
    """
    return replace(dense(), next=decision)
