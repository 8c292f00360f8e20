"""Agreement over a unit: one file per pattern, and the combinators that compose them."""

from gradwire.exchange.acp_sgd import acp_sgd
from gradwire.exchange.agreed import agreed
from gradwire.exchange.ar_topk import ar_topk
from gradwire.exchange.base import WHOLE, Exchange, Finish, run
from gradwire.exchange.compose import forget, remember, warm
from gradwire.exchange.dense import dense
from gradwire.exchange.every import every
from gradwire.exchange.gather import gather
from gradwire.exchange.gcomp import gcomp
from gradwire.exchange.gtop_k import gtop_k
from gradwire.exchange.leader import leader
from gradwire.exchange.majority import majority_vote
from gradwire.exchange.ok_topk import ok_topk
from gradwire.exchange.power_sgd import power_sgd
from gradwire.exchange.reduce import reduce
from gradwire.exchange.scatter_reduce import scatter_reduce
from gradwire.exchange.sketch import sketch

__all__ = [
    "WHOLE",
    "Exchange",
    "Finish",
    "acp_sgd",
    "agreed",
    "ar_topk",
    "dense",
    "every",
    "forget",
    "gather",
    "gcomp",
    "gtop_k",
    "leader",
    "majority_vote",
    "ok_topk",
    "power_sgd",
    "reduce",
    "remember",
    "run",
    "scatter_reduce",
    "sketch",
    "warm",
]
