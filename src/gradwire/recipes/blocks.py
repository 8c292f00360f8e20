"""int8, fp8, int4: all-reduce of codes in blocks, with a scale for each block.

Papers: int8 by Dettmers 2016 and Dettmers et al. 2022; the 8-bit float e4m3 by Micikevicius et al. 2022;
block sizes of int4 compared by Dettmers and Zettlemoyer 2023.

Differences from the papers, for all three: the papers have quantization alone. Here it is part of an
all-to-all and an all-gather, with a float32 sum between them (see `gradwire.exchange.scatter_reduce`). Error
feedback is added, and on by default. It costs one more gradient-sized buffer, and 0.2 ns per element for the
compensation that reads it (5 ms for 25 M elements).

- int8: without error feedback, values below 1/254 of their block's maximum would never be sent.
- fp8: the scale of a block maps its maximum to 448. Rounding to 4 significant bits errs by 2.6 % in every
  step, four times as much as int8 on normal numbers.
- int4: for gradients, not weights; integers -7 … 7. Without error feedback, most values would never be sent:
  on normal numbers, everything below a fifth of the standard deviation becomes 0.
"""

from gradwire.codec.blocks import blocks
from gradwire.recipes.base import Composition, register
from gradwire.recipes.low_bits import Collective, rounded


@register
def int8(block: int = 256, feedback: bool = True, collective: Collective = "all_reduce") -> Composition:
    """Every value in 8 bits and a scale per block: a quarter of the bytes, on any number of ranks.

    Travels: every value in 8 bits, and 4 bytes per block.
    Paper: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization".
    Use when: the network is 2 to 4 times too slow and every value should arrive in every step.

    Args:
        block: elements per scale.
        feedback: add the rounding error of a step to the next gradient. Without it, small values of
            a block are never sent.
        collective: "all_reduce" rounds twice, and its traffic does not grow with the number of ranks.
            "all_gather" rounds once, and every rank receives the codes of all others.
    """
    return rounded(blocks("int8", block), feedback, collective)


@register
def fp8(block: int = 256, feedback: bool = True, collective: Collective = "all_reduce") -> Composition:
    """Every value in 8 bits of e4m3 and a scale per block: small values next to large ones survive.

    Travels: every value in 8 bits, and 4 bytes per block.
    Paper: Micikevicius et al. 2022, "FP8 formats for deep learning".
    Use when: as int8, but magnitudes within a block differ by more than a hundred.

    Args:
        block, feedback, collective: as in `int8`.
    """
    return rounded(blocks("fp8", block), feedback, collective)


@register
def int4(block: int = 128, feedback: bool = True, collective: Collective = "all_reduce") -> Composition:
    """Every value in 4 bits with error feedback and a scale per block: 0.13 of the bytes.

    Travels: every value in 4 bits, and 4 bytes per block.
    Paper: Dettmers and Zettlemoyer 2023, "The case for 4-bit precision".
    Use when: the network is 4 to 7 times too slow; smaller blocks err less and cost more.

    Args:
        block, feedback, collective: as in `int8`.
    """
    return rounded(blocks("int4", block), feedback, collective)
