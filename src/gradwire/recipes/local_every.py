"""local_every: gradients add up on every rank, and one all-reduce in k steps brings their mean.

GComp (section 7.6) and others compare with it. Differences from plain gradient accumulation: the optimizer is
stepped all the same and sees zeros in between, so the learning rate's schedule keeps its count; what arrives
is the sum over the k steps, as error feedback has it, not their mean. Which step of k it is changes from time
to time, so that parameters which have gradients in some steps only travel, too. With `order="paper"` it is
always the same.
"""

from gradwire.exchange.compose import every, remember
from gradwire.exchange.dense import dense
from gradwire.exchange.turns import Order
from gradwire.recipes.base import Composition, register


@register
def local_every(interval: int = 8, order: Order = "random") -> Composition:
    """Accumulate locally, and all-reduce everything at once every few steps.

    Travels: the sum of k steps' gradients, in one of k steps.
    Paper: none; what GComp (section 7.6) compares with.
    Use when: as a baseline: the optimizer rests k - 1 steps and then takes k steps' gradients at once.
    """
    exchange = remember(every(interval, dense(), together=True, order=order))
    text = f"local_every({interval=})" if order == "random" else f"local_every({interval=}, {order=})"
    return Composition(exchange, tiny=text, text=text)
