"""bf16: all-reduce in bfloat16, on gloo too (torch refuses its own hook there by name)."""

import torch

from gradwire.codec import cast
from gradwire.exchange import reduce
from gradwire.recipes.base import Composition, register


@register
def bf16() -> Composition:
    """All-reduce in bfloat16: half the bytes, float32's range, 8 bits of precision."""
    return Composition("bf16", reduce(cast(torch.bfloat16)))
