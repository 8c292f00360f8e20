"""Collectives of our own, on point-to-point messages: the same code over processes and over threads."""

from collections.abc import Callable, Mapping

from torch import Tensor

from gradwire.comm.base import Algorithm, Broadcasting
from gradwire.comm.hops.base import Peers
from gradwire.comm.hops.ring import ring_all_reduce
from gradwire.comm.hops.scatter import scatter_broadcast
from gradwire.comm.hops.star import star_all_reduce
from gradwire.comm.hops.tree import tree_all_reduce

ALL_REDUCES: Mapping[Algorithm, Callable[[Tensor, Peers], None]] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "star": star_all_reduce,
}
"""By algorithm; the library's own is not among them."""

BROADCASTS: Mapping[Broadcasting, Callable[[Tensor, int, Peers], None]] = {"scatter": scatter_broadcast}
"""As `ALL_REDUCES`."""

__all__ = [
    "ALL_REDUCES",
    "BROADCASTS",
    "Peers",
    "ring_all_reduce",
    "scatter_broadcast",
    "star_all_reduce",
    "tree_all_reduce",
]
