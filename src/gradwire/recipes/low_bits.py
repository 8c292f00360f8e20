"""The common part of recipes in few bits: a mean of codes, with or without error feedback.

Apart from `blocks`, because `truncate` needs no kernels of blocks, and what is imported is compiled.
"""

from typing import Literal, get_args

from gradwire.codec.base import Codec
from gradwire.exchange.compose import forget, remember
from gradwire.exchange.payloads import gather
from gradwire.exchange.scatter_reduce import scatter_reduce
from gradwire.recipes.base import Composition

TOGETHER = 1 << 17
"""Size in elements below which a flat buffer is one unit. Such a flat buffer usually comes in one of DDP's
buckets, when the backward pass ends, so more units would hide nothing. Recipes that select elements differ:
each unit is a range of the selection there, and a selection over everything leaves out whole layers."""

Collective = Literal["all_reduce", "all_gather"]


def rounded(codec: Codec, feedback: bool, collective: Collective = "all_reduce") -> Composition:
    """Composition of an all-reduce or all-gather in the codes of `codec`.

    Units are cut from a flat buffer even without feedback, so that blocks follow parameters and not DDP's
    buckets.

    Args:
        codec: encodes the values.
        feedback: keep rounding errors for the next step; without it they are lost.
        collective: "all_reduce" takes two rounds and rounds twice, "all_gather" one round and rounds once.
            Between two ranks both cost the same bytes.

    Raises `ValueError` for another `collective`.

    >>> from gradwire.codec.blocks import blocks
    >>> rounded(blocks("int8"), feedback=False).exchange.memory
    NoMemory(as_arrived=False)
    """
    if collective not in get_args(Collective):
        raise ValueError(f"collective={collective!r} is none of {', '.join(get_args(Collective))}")
    gathered = collective == "all_gather"
    exchange = gather(codec) if gathered else scatter_reduce(codec, second_stage=feedback)
    return Composition(remember(exchange) if feedback else forget(exchange), whole_below=TOGETHER)
