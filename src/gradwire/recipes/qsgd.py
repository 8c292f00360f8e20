"""qsgd: stochastic rounding to levels of a bucket's norm (Alistarh et al. 2017).

Differences from the paper: codes of a fixed 2, 4 or 8 bits instead of Elias' code; with `feedback`, which
needs a contraction, what is rounded off is remembered.
"""

from typing import Literal

from gradwire.codec.qsgd import qsgd as quantizer
from gradwire.exchange.compose import forget, remember
from gradwire.exchange.gather import gather
from gradwire.recipes.base import Composition, register


@register
def qsgd(
    bits: int = 8, bucket: int = 512, norm: Literal["l2", "max"] = "l2", feedback: bool = False
) -> Composition:
    """Levels of 2, 4 or 8 bits, right in the mean, all-gathered: traffic grows with the world.

    Travels: a code per element and a scale per bucket, of every rank.
    Paper: Alistarh et al. 2017, "QSGD: Communication-efficient SGD via gradient quantization and encoding".
    Use when: there are two to four ranks, a quarter of the traffic is enough, and memory is short.
    """
    exchange = gather(quantizer(bits, bucket, norm))
    return Composition(remember(exchange) if feedback else forget(exchange))
