"""powersgd, acpsgd: low-rank factors of every matrix, by one step of power iteration.

Papers: PowerSGD by Vogels et al. 2019. ACP-SGD computes one of the two factors per step, in turns (Zhang,
Zhang, Shi, Chu and Li 2023).

Differences from the papers: see `gradwire.exchange.low_rank`. Also, vectors and tiny tensors are sent
densely, as all non-matrices are in PowerSGD's paper.

- powersgd: a matrix is compressed if that makes it smaller (torch's hook asks for a factor of 2). There is no
  dense start unless `warmup_steps` asks for one, as in the paper. torch's hook sends its first 1000 steps
  densely, which is safer and, on a link that needs compression, slow.
"""

from gradwire.exchange.compose import remember, warm
from gradwire.exchange.low_rank import acp_sgd, power_sgd
from gradwire.exchange.round_robin import Order
from gradwire.recipes.base import Composition, register


@register
def powersgd(rank: int = 1, warmup_steps: int = 0) -> Composition:
    """Rank-r factors of every gradient matrix with error feedback; two small all-reduces per unit.

    Travels: rank·(rows + columns) values of every matrix, whatever the number of ranks.
    Paper: Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression".
    Use when: traffic must fall by 50 to 300 times on any number of ranks; rank 2 to 4 where 1 costs accuracy.

    Args:
        rank: columns of each factor.
        warmup_steps: steps at the beginning that send gradients densely.
    """
    return Composition(remember(warm(warmup_steps, power_sgd(rank))))


@register
def acpsgd(rank: int = 1, warmup_steps: int = 0, order: Order = "random") -> Composition:
    """One of two low-rank factors per step with error feedback; one small all-reduce per unit.

    Travels: rank·rows values of every matrix in one step, rank·columns in the next.
    Paper: Zhang et al. 2023, "Evaluation and optimization of gradient compression for distributed
        deep learning".
    Use when: powersgd's traffic suits, but the latency of two dependent all-reduces per unit does not. Two
        steps of acpsgd do the work of one step of powersgd.

    Args:
        rank: columns of each factor.
        warmup_steps: steps at the beginning that send gradients densely.
        order: "random" draws the factor to begin with every six steps, from the seed that all ranks share;
            "paper" sends the left factor in even steps.
    """
    return Composition(remember(warm(warmup_steps, acp_sgd(rank, order))))
