"""fp16: all-reduce in half precision.

Differences from torch's `fp16_compress_hook`: the mean is taken before the cast as there, and an
overflow is agreed on by all ranks before anything is committed.
"""

import torch

from gradwire.codec.cast import cast
from gradwire.exchange.payloads import reduce
from gradwire.recipes.base import Composition, register


@register
def fp16() -> Composition:
    """All-reduce in float16: half the bytes, overflow above 65504.

    Travels: every value in 16 bits.
    Paper: Micikevicius et al. 2018, "Mixed precision training".
    Use when: the network is at most twice too slow; three more bits of precision than bf16.
    """
    return Composition(reduce(cast(torch.float16)))
