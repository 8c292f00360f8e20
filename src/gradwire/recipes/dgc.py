"""dgc: deep gradient compression (Lin, Han, Mao, Wang and Dally 2018).

Momentum correction, factor masking, local clipping (`gradwire.memory.momentum`), a threshold from a sample
(`gradwire.codec.select`), and a ratio that falls to its final value in four stages.

Differences from the paper: the stages last `warmup_steps` together, not four epochs, which nobody here
knows; the choice is made per unit, not per layer; vectors and tiny tensors travel densely, with momentum
but, as nothing of them ever waits, without masking.
"""

from functools import partial

from gradwire.codec import sampled_top_k, sparse
from gradwire.codec.select import ramp
from gradwire.exchange import dense, gather, remember
from gradwire.memory import MomentumCorrection
from gradwire.recipes.base import Composition, register


@register
def dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    warmup_steps: int = 200,
    sample: float = 0.01,
    clip: float | None = None,
    nesterov: bool = False,
) -> Composition:
    """Sampled top-k of locally corrected momentum, all-gathered; for SGD without a momentum of its own.

    Travels: places and values of every rank's own choice.
    Paper: Lin et al. 2018, "Deep gradient compression".
    Use when: ratios of 0.1 % are wanted on two to four ranks, and the optimizer is SGD with momentum.
    """
    memory = MomentumCorrection(momentum, nesterov, masking=ratio < 1.0, clip=clip)
    selector = ramp(partial(sampled_top_k, sample=sample), ratio, warmup_steps)
    exchange = gather(sparse(selector)) if ratio < 1.0 else dense()
    tiny = f"dgc(ratio=1.0, {momentum=}, {warmup_steps=}, {sample=}, {clip=}, {nesterov=})"
    return Composition(remember(exchange, memory), tiny=tiny)
