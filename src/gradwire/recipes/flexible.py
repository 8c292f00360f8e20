"""flexible: AR-Topk's ratio and collective, chosen again whenever the link or the gradient changes.

Tyagi and Swany 2024, "Flexible communication for optimal distributed learning over unpredictable networks",
sections III-C and III-D. Differences from the paper: see `gradwire.adapt.flexible`; what is unsent moves on
to the next choice whole; the ring is the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
from torch import Tensor

from gradwire.adapt.flexible import PROBES, WAYS, Choice, Flexible, Rule
from gradwire.codec import sparse, top_k
from gradwire.codec.indices import bits_per_index
from gradwire.exchange import Exchange, ar_topk, gather, remember
from gradwire.kernels import magnitude_edges, magnitude_histogram
from gradwire.plan import Magnitudes, Observed, Watched, candidate_ratios, gains, ramped_cuts
from gradwire.plan.ar_topk import ALL_GATHER, TREE
from gradwire.recipes.ar_topk import one_unit
from gradwire.recipes.base import Composition, Judge, Watch, register


@register
def flexible(
    ratio: float = 0.1,
    way: str = "ring",
    low: float = 0.001,
    high: float = 0.1,
    rule: Rule = "progress",
    fused: bool = True,
    every: int = 5,
) -> Composition:
    """Top-k of a ratio and by a collective that follow the link and the gradient while training goes on.

    Travels: the places of one rank's choice and everybody's values there, or everybody's own of both.
    Paper: Tyagi and Swany 2024, "Flexible communication for optimal distributed learning".
    Use when: the network's latency or bandwidth changes while training, as in a shared cloud or at the edge.
    """
    if way not in WAYS:
        raise ValueError(f"way={way!r} is none of {', '.join(WAYS)}")
    if rule not in get_args(Rule):
        raise ValueError(f"rule={rule!r} is none of {', '.join(get_args(Rule))}")
    if every < 2:
        raise ValueError(f"every={every}: a probe follows each look, so look every second step at most")
    ratios = tuple(round(each, 6) for each in candidate_ratios(low, high))

    def compose(choice: Choice, why: str) -> Composition:
        following = flexible(choice.ratio, choice.way, low, high, rule, fused, every)
        return replace(following, why=why)

    watch = Watch(
        judge=partial(_judge, Choice(ratio, way), ratios, rule, compose),
        every=every,
        look=partial(energies, ratios=ratios),
        looks=1 + len(ratios),
        probes=PROBES,
    )
    return Composition(exchange_of(ratio, way), one_unit if fused else ramped_cuts, watch=watch)


def exchange_of(ratio: float, way: str) -> Exchange:
    """What carries the choice: everybody's own by all-gather, or a leader's by ring or tree."""
    if way == ALL_GATHER:
        return remember(gather(sparse(top_k(ratio))))
    return remember(ar_topk(top_k(ratio), algorithm="tree" if way == TREE else "library"))


def energies(x: Tensor, ratios: Sequence[float]) -> list[float]:
    """‖x‖² and what of it the top-k at each ratio would send, from one histogram; zeros if x is not finite.

    >>> import torch
    >>> energies(torch.tensor([3.0, 1.0, 0.0, 0.0]), [0.25])
    [10.0, 9.0]
    """
    histogram = magnitude_histogram(x)
    total = float(histogram.energies.sum())
    if not np.isfinite(total):
        return [0.0] * (1 + len(ratios))  # a step that will not be committed
    edges, counts = magnitude_edges().numpy(), histogram.counts.numpy()
    found = gains(Magnitudes(edges, counts, histogram.energies.numpy()), ratios)
    return [total, *(total * gain.value for gain in found)]


def _judge(
    now: Choice,
    ratios: Sequence[float],
    rule: Rule,
    compose: Callable[[Choice, str], Composition],
    watched: Watched,
) -> Judge:
    controller = Flexible(now, watched, ratios, bits_per_index, rule)

    def judge(shown: Observed) -> Composition | None:
        choice = controller.observe(shown)
        if choice is None:
            return None
        link = controller.link
        why = (
            f"step {shown.step}: {link.alpha_s * 1e3:.2f} ms and {8e-6 / link.beta_s:.0f} Mbit/s call for "
            f"{choice.ratio:.2%} by {choice.way}"
        )
        return compose(choice, why)

    return judge
