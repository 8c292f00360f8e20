"""dgc: deep gradient compression (Lin, Han, Mao, Wang and Dally 2018).

Momentum correction, factor masking, local clipping (`gradwire.memory.momentum`), and a ratio that falls to
its final value in four stages.

Differences from the paper: the k largest are chosen exactly, because that takes less time here than a
threshold from a sample (`sample` below 1 draws one, `gradwire.codec.select.sampled`); the stages last
`warmup_steps` together, not four epochs, which nobody here knows; the choice is made per unit, not per layer;
vectors and tiny tensors travel densely, with momentum but, as nothing of them ever waits, without masking. A
parameter whose gradient is exactly zero on a rank sends nothing there and keeps its momentum in that step; in
the paper the momentum would decay and move the parameter.
"""

from functools import partial

from gradwire.codec.select.ramp import ramp
from gradwire.codec.select.sampled import sampled_top_k
from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.exchange.compose import remember
from gradwire.exchange.dense import dense
from gradwire.exchange.gather import gather
from gradwire.memory import MomentumCorrection
from gradwire.recipes.base import Composition, register


@register
def dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    warmup_steps: int = 200,
    sample: float = 1.0,
    clip: float | None = None,
    nesterov: bool = False,
) -> Composition:
    """Top-k of locally corrected momentum, all-gathered; for SGD without a momentum of its own.

    Travels: places and values of every rank's own choice.
    Paper: Lin et al. 2018, "Deep gradient compression".
    Use when: ratios of 0.1 % are wanted on two to four ranks, and the optimizer is SGD with momentum.
    """
    memory = MomentumCorrection(momentum, nesterov, masking=ratio < 1.0, clip=clip)
    choose = top_k if sample == 1.0 else partial(sampled_top_k, sample=sample)
    selector = ramp(choose, ratio, warmup_steps)
    exchange = gather(sparse(selector)) if ratio < 1.0 else dense()
    tiny = f"dgc(ratio=1.0, {momentum=}, {warmup_steps=}, {sample=}, {clip=}, {nesterov=})"
    return Composition(remember(exchange, memory), tiny=tiny)
