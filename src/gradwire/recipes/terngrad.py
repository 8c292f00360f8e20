"""terngrad: −s, 0 or +s per element, right in the mean (Wen et al. 2017).

Differences from the paper: ranks do not share a scale, as every rank decodes every other's
(`gradwire.codec.tern_grad`); clipping, which is not right in the mean, is an option and off by default;
vectors and tiny tensors travel densely, where the paper has a scale for each of them.
"""

from gradwire.codec.tern_grad import tern_grad
from gradwire.exchange.compose import forget
from gradwire.exchange.gather import gather
from gradwire.recipes.base import Composition, register


@register
def terngrad(clip: float | None = None) -> Composition:
    """Two bits per element without a memory, all-gathered: traffic grows with the world.

    Travels: −1, 0 or 1 per element and a scale per parameter, of every rank.
    Paper: Wen et al. 2017, "TernGrad: ternary gradients to reduce communication in deep learning".
    Use when: there are many noisy steps, and no memory for error feedback; clip=2.5 is the paper's setting.
    """
    return Composition(forget(gather(tern_grad(clip))))
