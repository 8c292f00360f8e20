"""acpsgd: PowerSGD's two factors in turns, one per step (Zhang, Zhang, Shi, Chu and Li 2023).

See `gradwire.exchange.low_rank` for how it differs from the paper. Vectors and tiny tensors travel densely.
"""

from gradwire.exchange.compose import remember, warm
from gradwire.exchange.low_rank import acp_sgd
from gradwire.exchange.turns import Order
from gradwire.recipes.base import Composition, register


@register
def acpsgd(rank: int = 1, warmup_steps: int = 0, order: Order = "random") -> Composition:
    """One of two low-rank factors per step with error feedback; one small all-reduce per unit.

    Travels: rank·rows values of every matrix in one step, rank·columns in the next.
    Paper: Zhang et al. 2023, "Evaluation and optimization of gradient compression for distributed
        deep learning".
    Use when: as powersgd, where its two dependent all-reduces per unit cost more than half as many factors.

    Which of the two begins is drawn anew every six steps; with the `order` "paper" it is always the first.
    """
    return Composition(remember(warm(warmup_steps, acp_sgd(rank, order))))
