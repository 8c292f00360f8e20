"""truncate: the mantissa's lower bits are cut off, the baseline of GComp (Li et al. 2024).

Differences from the paper: what is kept is packed without a gap, and summed in float32 between an all-to-all
and an all-gather (see `gradwire.exchange.scatter_reduce`) where the paper cuts in every hop of a ring.
Without error feedback, as there, it is biased: 1 % of the magnitude is lost at 18 bits, twice.
"""

from gradwire.codec.truncate import truncate as upper_bits
from gradwire.recipes.base import Composition, register
from gradwire.recipes.rounded import rounded


@register
def truncate(bits: int = 18, feedback: bool = False) -> Composition:
    """Sign, exponent and 23 - bits bits of mantissa: 0.44 of the bytes at 18, and biased without feedback.

    Travels: the upper 32 - bits bits of every value.
    Paper: Li et al. 2024, "Near-lossless gradient compression for data-parallel distributed DNN training".
    Use when: as a baseline; int8 with error feedback is smaller and errs less.
    """
    return rounded(upper_bits(bits), feedback)
