"""gcomp: a compressed ring all-reduce that loses what a step would round off anyway (Li et al. 2024).

Differences from the paper: thresholds as fine as a bit that do not travel ("near"; the paper's levels are
"levels"). They do not end at 18 bits, where the paper ends so that no gradient changes by more than 2^-5 of
itself (section 5.1): a value may become zero, and momentum or moments miss it. Further, rounding to nearest
in all modes, "truncate" too (the recipe `truncate` cuts, as the paper's baseline does), a table per
unit, and a bound that is stated and tested: with W ranks a step moves no parameter by W units in its last
place more or less than exact gradients would (Adam: 1.47 times that; see `gradwire.metric`).
`gradwire.attach` must be given the optimizer.

Gradients of bfloat16 and float16 parameters travel and are summed in that type: "lossless" on two ranks has
the bits of DDP. What moves a parameter is measured in units of its own type, of which a step may move it by
W/32 in bfloat16 and W/4 in float16: their units are as large as updates are. "near" takes fewer bytes there
than "levels", of which only the first fits into so short a mantissa. "truncate" keeps 23 − bits at most.

Numbers below the normal range of float32 and bfloat16 (2^-126) become zero: with "truncate" always, with
"near" and "levels" in every segment of which anything at all may be lost, with "lossless" never.
"""

from gradwire.exchange.compose import forget
from gradwire.exchange.gcomp import REFRESH, Mode, Tables
from gradwire.exchange.gcomp import gcomp as compressed_ring
from gradwire.memory import NoMemory
from gradwire.recipes.base import Composition, register


@register
def gcomp(
    mode: Mode = "near", bits: int = 18, tables: Tables = "dynamic", refresh: int = REFRESH
) -> Composition:
    """Every value, as precisely as the optimizer can tell: 0.3 to 0.6 of the bytes; lossless: 0.7 to 0.9.

    Travels: exponents by Huffman code, signs, and of mantissas what moves the parameter.
    Paper: Li et al. 2024, "Near-lossless gradient compression for data-parallel distributed DNN training".
    Use when: the network is up to twice too slow and training must be as without compression; with SGD and
        momentum mode="levels" stays nearer to it, and sends more.

    Args:
        mode, bits, tables, refresh: as in `gradwire.exchange.gcomp.gcomp`.
    """
    return Composition(forget(compressed_ring(mode, bits, tables, refresh), NoMemory(as_arrived=True)))
