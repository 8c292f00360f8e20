"""fp8: all-reduce in blocks of 8-bit floats, e4m3 (Micikevicius et al. 2022).

Differences from the paper: a scale per block that maps its maximum to 448; all-to-all, float32 sum and
all-gather (see `gradwire.exchange.scatter_reduce`). Error feedback is ours, and on, as for int8: rounding to
4 significant bits errs by 2.6 % in every step, four times as much as int8 on normal numbers.
"""

from gradwire.codec.blocks import blocks
from gradwire.recipes.base import Composition, register
from gradwire.recipes.low_bits import Collective, rounded


@register
def fp8(block: int = 256, feedback: bool = True, collective: Collective = "all_reduce") -> Composition:
    """Every value in 8 bits of e4m3 and a scale per block: small values next to large ones survive.

    Travels: every value in 8 bits, and 4 bytes per block.
    Paper: Micikevicius et al. 2022, "FP8 formats for deep learning".
    Use when: as int8, but magnitudes within a block differ by more than a hundred.
    """
    return rounded(blocks("fp8", block), feedback, collective)
