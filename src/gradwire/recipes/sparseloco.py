"""sparseloco: the largest of every chunk in two bits, with error feedback that decays.

Sarfi, Thérien, Lidin and Belilovsky 2025, "Communication efficient LLM pre-training with SparseLoCo", arXiv
2508.15706: e ← β·e + Δ; Δ̂ = Q(Top-k(e)) in chunks; e ← e − Δ̂; the mean of Δ̂ over the replicas. Δ is what some
local steps have changed. The decay stands for an outer optimizer's momentum.

Differences from the paper: a chunk is 4096 elements in a row, not 64 × 64 of a matrix, and may span
parameters; places take 8 bits, not 12 (`gradwire.codec.indices`); the two-bit values are those of
`gradwire.codec.levels`. Vectors and tiny tensors are chosen from like all else: densely, they would be most
of what a small model sends.
"""

from gradwire.codec.select.chunks import ChunkTopK
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import gather
from gradwire.memory import Residual
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import CodedValues, coded


@register
def sparseloco(
    keep: int = 64, chunk: int = 4096, decay: float = 0.95, values: CodedValues = "int2"
) -> Composition:
    """The largest of every chunk in two bits, all-gathered; what waits decays. For rounds of local steps.

    Travels: places and values of every rank's own choice, a share of each chunk.
    Paper: Sarfi et al. 2025, "Communication efficient LLM pre-training with SparseLoCo", arXiv 2508.15706.
    Use when: two to four replicas exchange what many local steps have changed; on gradients of every step, a
        `decay` of 1 loses nothing of what waits.

    Args:
        keep: elements to send of every chunk, 1 … chunk.
        chunk: elements of a chunk.
        decay: factor on the memory in every round, 0 … 1.
        values: format of the values, as in `topk`.
    """
    if not 1 <= keep <= chunk:
        raise ValueError(
            f"keep={keep} is outside 1 … chunk={chunk}: it is the number of elements kept per chunk"
        )
    exchange = remember(gather(coded(ChunkTopK(chunk, keep), values)), Residual(decay))
    everything = f"sparseloco({keep=}, {chunk=}, {decay=}, {values=})"
    return Composition(exchange, tiny=everything, text=everything)
