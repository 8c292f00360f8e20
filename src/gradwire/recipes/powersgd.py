"""powersgd: low-rank factors of every matrix, by one step of power iteration (Vogels et al. 2019).

See `gradwire.exchange.low_rank` for how it differs from the paper's algorithm 1. Beyond that: a matrix is
compressed wherever that makes it smaller (torch's hook asks for a factor of 2), and vectors and tiny tensors
travel densely, as all do in the paper that are no matrices. There is no dense start unless `warmup_steps`
asks for one, as in the paper; torch's hook sends its first 1000 steps densely, which is safer and, on a link
that needs compression, slow.
"""

from gradwire.exchange.compose import remember, warm
from gradwire.exchange.low_rank import power_sgd
from gradwire.recipes.base import Composition, register


@register
def powersgd(rank: int = 1, warmup_steps: int = 0) -> Composition:
    """Rank-r factors of every gradient matrix with error feedback; two small all-reduces per unit.

    Travels: rank·(rows + columns) values of every matrix, whatever the number of ranks.
    Paper: Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression".
    Use when: traffic must fall by 50 to 300 times on any number of ranks; rank 2 to 4 where 1 costs accuracy.
    """
    return Composition(remember(warm(warmup_steps, power_sgd(rank))))
