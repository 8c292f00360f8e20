"""local_every: gradients add up on every rank; one all-reduce in k steps sends their sum.

GComp (section 7.6) and others use it for comparison. Differences from plain gradient accumulation: the
optimizer steps all the same and sees zeros in between, so the learning rate's schedule keeps its count. The
result is the sum over the k steps, as with error feedback, not their mean. The step of the cycle changes from
time to time, so that parameters with gradients in some steps only are sent, too. With `order="paper"` it is
always the same step.
"""

from gradwire.exchange.compose import every, remember
from gradwire.exchange.dense import dense
from gradwire.exchange.round_robin import Order
from gradwire.recipes.base import Composition, register


@register
def local_every(interval: int = 8, order: Order = "random") -> Composition:
    """Accumulate locally, and all-reduce everything at once every few steps.

    Travels: the sum of k steps' gradients, in one of k steps.
    Paper: none; what GComp (section 7.6) compares with.
    Use when: as a baseline: the optimizer rests k - 1 steps and then takes k steps' gradients at once.

    Args:
        interval: k, steps from one exchange to the next.
        order: with "random" the step of a cycle in which all is sent is drawn anew, as for `covap`. With
            "paper" it is the same in each cycle.
    """
    exchange = remember(every(interval, dense(), together=True, order=order))
    text = f"local_every({interval=})" if order == "random" else f"local_every({interval=}, {order=})"
    return Composition(exchange, tiny=text, text=text)
