"""leader_topk: one rank's top-k indices for everybody (CLT-k of ScaleCom, STAR and VAR of AR-Topk).

Differences from the papers: per unit, not fused over the gradient; indices are spread by an all-reduce
(see `gradwire.exchange.leader`), as a bitmap where that is shorter than a list; plain error feedback, no
low-pass memory; values may travel in 16 bits.
"""

from typing import Literal, get_args

import torch

from gradwire.codec import top_k
from gradwire.exchange import leader, remember
from gradwire.exchange.leader import Elect
from gradwire.recipes.base import Composition, register

Values = Literal["full", "fp16", "bf16"]
DTYPES = {"full": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@register
def leader_topk(ratio: float = 0.01, elect: Elect = "round_robin", values: Values = "full") -> Composition:
    """One leader's top-k for all ranks with error feedback: traffic constant in the world."""
    if values not in DTYPES:
        raise ValueError(f"values={values!r} is none of {', '.join(get_args(Values))}")
    exchange = remember(leader(top_k(ratio), elect, DTYPES[values]))
    return Composition(f"leader_topk(ratio={ratio!r}, elect={elect!r}, values={values!r})", exchange)
