"""fp16, bf16: all-reduce in half precision; bf16 on gloo too (torch refuses its own hook there by name).

Differences from torch's `fp16_compress_hook`: as there, the mean is taken before the cast. All ranks agree on
an overflow before anything is committed.

With `bf16(sum="fp32")`, only payloads are bfloat16: all-to-all, one sum in float32, all-gather (see
`gradwire.exchange.scatter_reduce`). The bytes are those of an all-reduce. A value is rounded twice for any
number of ranks; in an all-reduce, every addition rounds once more. Megatron-LM's
`reduce_scatter_with_fp32_accumulation` is the first half of it.
"""

from typing import Literal, get_args

import torch

from gradwire.codec.cast import cast
from gradwire.exchange.payloads import reduce
from gradwire.exchange.scatter_reduce import scatter_reduce
from gradwire.recipes.base import Composition, register

Sum = Literal["bf16", "fp32"]


@register
def fp16() -> Composition:
    """All-reduce in float16: half the bytes, overflow above 65504.

    Travels: every value in 16 bits.
    Paper: Micikevicius et al. 2018, "Mixed precision training".
    Use when: the network is at most twice too slow; three more bits of precision than bf16.
    """
    return Composition(reduce(cast(torch.float16)))


@register
def bf16(sum: Sum = "bf16") -> Composition:
    """All-reduce in bfloat16: half the bytes, float32's range, 8 bits of precision.

    Travels: every value in 16 bits.
    Paper: Kalamkar et al. 2019, "A study of bfloat16 for deep learning training".
    Use when: the network is at most twice too slow and gradients may be large; `sum="fp32"` on many ranks.

    Args:
        sum: the type in which ranks' values are added: "bf16", by the library's all-reduce, or "fp32" in rank
            order, in two collectives for every 2^20 elements.

    >>> bf16(sum="fp32").exchange.laws.in_place
    True
    """
    if sum not in get_args(Sum):
        raise ValueError(f"sum={sum!r} is none of {', '.join(get_args(Sum))}")
    short = cast(torch.bfloat16)
    return Composition(reduce(short) if sum == "bf16" else scatter_reduce(short, second_stage=False))
