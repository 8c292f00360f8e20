"""bf16: all-reduce in bfloat16, on gloo too (torch refuses its own hook there by name)."""

import torch

from gradwire.codec.cast import cast
from gradwire.exchange.payloads import reduce
from gradwire.recipes.base import Composition, register


@register
def bf16() -> Composition:
    """All-reduce in bfloat16: half the bytes, float32's range, 8 bits of precision.

    Travels: every value in 16 bits.
    Paper: Kalamkar et al. 2019, "A study of bfloat16 for deep learning training".
    Use when: the network is at most twice too slow and gradients may be large.
    """
    return Composition(reduce(cast(torch.bfloat16)))
