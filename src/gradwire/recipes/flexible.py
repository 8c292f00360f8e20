"""flexible: AR-Topk's ratio and collective, chosen again when the link or the gradient changes.

Tyagi and Swany 2023, "Flexible communication for optimal distributed learning over unpredictable networks",
sections 3-D and 3-E. Differences from the paper:

- By default, the ratio with the most gain per second is chosen, not a knee (`rule`), and a change of the gain
  starts a new plan, too (`trigger`). `flexible(rule='knee', trigger='link')` is nearest to the paper.
- Compression counts as equally long at all ratios, as in the authors' code.
- The gain is that of an exact top-k, from a histogram of the live gradient, for any selector `inner`.
- The steps' own collectives measure the link, and every collective is tried for a few steps.
- The whole unsent gradient moves on to the next choice. The ring is the library's. See
  `gradwire.planning.flexible`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, pairwise
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.select.base import Selector
from gradwire.codec.sparse import sparse
from gradwire.comm.base import Round
from gradwire.exchange.ar_topk import Election, ar_topk
from gradwire.exchange.base import Exchange, parts
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import gather
from gradwire.kernels.magnitudes import magnitude_edges, magnitude_histogram
from gradwire.planning.facts import StepObservation, Watched
from gradwire.planning.flexible import WAYS, Choice, Flexible, Rounds, Rule, Trigger
from gradwire.planning.ratio import ALL_GATHER, FACTOR, TREE, Magnitudes, candidate_ratios, gains
from gradwire.recipes.base import Composition, Cutter, Judge, Watch, register
from gradwire.recipes.parse import Recipe, recipe
from gradwire.recipes.units import fused_cutter
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import ParameterSpec


@register
def flexible(
    ratio: float = 0.1,
    way: str = "ring",
    low: float = 0.001,
    high: float = 0.1,
    rule: Rule = "progress",
    fused: bool = True,
    every: int = 5,
    link_change: float = 0.2,
    gain_change: float = 0.1,
    factor: float = FACTOR,
    elect: Election = "round_robin",
    trigger: Trigger = "any",
    inner: str = "topk",
) -> Composition:
    """Top-k of a ratio and by a collective that follow the link and the gradient while training goes on.

    Travels: the places of one rank's choice and all ranks' values there, or each rank's own of both.
    Paper: Tyagi and Swany 2023, "Flexible communication for optimal distributed learning".
    Use when: the network's latency or bandwidth changes while training, as in a shared cloud or at the edge.

    It plans anew if the time of the steps' own collectives changes, or if the sent share of the gradient
    does. At first, and if the time of a step changes over the same link, it tries every collective. Ordinary
    variation of these numbers does not count.

    Args:
        ratio: share of the elements that is sent at first.
        way: the collective at first, one of `gradwire.planning.flexible.WAYS`.
        low: the smallest candidate ratio.
        high: the largest candidate ratio.
        rule: how one of the candidate ratios is chosen, `gradwire.planning.flexible.Rule`.
        fused: select once from the whole gradient, after the backward pass.
        every: steps from one look to the next, and steps for which a collective is tried.
        link_change: share by which the time of collectives, or of a step, has to change. No value is
            published.
        gain_change: share by which the sent part of the gradient has to change. At 10 % the paper measures
            gains again.
        factor: ratio of one candidate ratio to the next. By default they are the paper's five.
        elect: which rank leads in ring and tree. Ranks lead in turn ("round_robin", the paper's STAR), or
            the rank with the largest choice does ("variance", its VAR). "auto" takes the better of the two.
        trigger: with "link" it plans anew only if the link changes, as the paper does. With "any" it also
            does if the sent part of the gradient changes.
        inner: a recipe that chooses a `ratio` of the elements, such as "mstopk" or "sidco(stages=2)"; only
            its choice is used.
    """
    for name, given, known in (
        ("way", way, WAYS),
        ("rule", rule, get_args(Rule)),
        ("elect", elect, get_args(Election)),
        ("trigger", trigger, get_args(Trigger)),
    ):
        if given not in known:
            raise ValueError(f"{name}={given!r} is none of {', '.join(known)}")
    if every < 1:
        raise ValueError(
            f"every={every} must be at least 1: the steps from one look at the gradient to the next"
        )
    for option, by in (("link_change", link_change), ("gain_change", gain_change)):
        if not by > 0.0:
            raise ValueError(f"{option}={by} must be positive: a share, such as 0.2 for a fifth")
    if 0.0 < low < SMALLEST:
        raise ValueError(f"low={low} is below {SMALLEST}, to which ratios are rounded")
    ratios = tuple(round(each, 6) for each in candidate_ratios(low, high, factor))

    def compose(choice: Choice, why: str) -> Composition:
        asked = low, high, rule, fused, every, link_change, gain_change, factor, elect, trigger, inner
        return replace(flexible(choice.ratio, choice.way, *asked), why=why)

    cutter = fused_cutter(fused)

    def controller(watched: Watched) -> Flexible:
        rounds = rounds_of(watched, cutter, elect, inner)
        return Flexible(Choice(ratio, way), watched, ratios, rounds, rule, gain_change, trigger)

    watch = Watch(
        judge=partial(_judge, controller, compose),
        every=every,
        look=partial(energies, ratios=ratios),
        looks=1 + len(ratios),
        link_change=link_change,
    )
    return Composition(exchange_of(ratio, way, elect, inner), cutter, watch=watch)


SMALLEST = 1e-6


def exchange_of(ratio: float, way: str, elect: Election = "round_robin", inner: str = "topk") -> Exchange:
    """The exchange of a choice: each rank's own elements by all-gather, or a leader's by ring or tree.

    Args:
        ratio: share of the elements to send, above 0 and at most 1.
        way: `ALL_GATHER`, `TREE`, or a ring.
        elect: how the leader of ring and tree is elected.
        inner: recipe whose selector is used, such as "topk" or "sidco(stages=2)".
    """
    chosen = selector_of(inner, ratio)
    if way == ALL_GATHER:
        return remember(gather(sparse(chosen)))
    if way == TREE:  # the library's broadcast is one, too: ⌈log2 N⌉ hops, where a scatter takes N
        return remember(ar_topk(chosen, elect, algorithm="tree", broadcast="library"))
    return remember(ar_topk(chosen, elect))


def selector_of(inner: str, ratio: float) -> Selector:
    """The selector of the recipe `inner`, at this `ratio`. Raises `ValueError` for other recipes.

    >>> selector_of("sidco(stages=2)", 0.01)
    Sidco(ratio=0.01, stages=2, fit='exponential')
    """
    asked = recipe(inner)
    if "ratio" in asked.options:
        raise ValueError(f"inner={inner!r} gives a ratio, which is chosen while training goes on")
    built = recipe(Recipe(asked.name, {**asked.options, "ratio": ratio})).build()
    found = next((part for part in parts(built.exchange) if isinstance(part, Selector)), None)
    if found is None:
        raise ValueError(f"inner={inner!r} chooses no elements; take topk, mstopk, sidco or lwtopk")
    return found


def rounds_of(
    watched: Watched, cutter: Cutter | None, elect: Election = "round_robin", inner: str = "topk"
) -> Rounds:
    """A function from a choice to the collectives of all units of the `watched` flat buffer in a step.
    `cutter` divides the flat buffer into units; `elect` and `inner` are as in `exchange_of`.

    >>> sent = rounds_of(Watched(4, (600, 400)), fused_cutter(True))(Choice(0.1, "tree"))
    >>> [(each.verb, each.algorithm) for each in sent]
    [('broadcast', 'library'), ('all_reduce', 'tree')]
    """
    specs = [ParameterSpec(f"{n}", (size,), torch.float32, size) for n, size in enumerate(watched.sizes)]
    ctx = ExchangeContext(0, 0, 0, watched.world)

    @cache
    def rounds(choice: Choice) -> tuple[Round, ...]:
        exchange = exchange_of(choice.ratio, choice.way, elect, inner)
        boundaries = Composition(exchange, cutter).boundaries(specs, watched.world)
        units = [stop - start for start, stop in pairwise((0, *boundaries, sum(watched.sizes)))]
        return tuple(chain.from_iterable(exchange.rounds(numel, torch.float32, ctx) for numel in units))

    return rounds


def energies(x: Tensor, ratios: Sequence[float]) -> list[float]:
    """‖x‖², and the energy that a top-k at each ratio would send, from one histogram; zeros if x is not
    finite.

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
    controller_of: Callable[[Watched], Flexible],
    compose: Callable[[Choice, str], Composition],
    watched: Watched,
) -> Judge:
    controller = controller_of(watched)

    def judge(shown: StepObservation) -> Composition | None:
        choice = controller.observe(shown)
        if choice is None:
            return None
        following = compose(choice, f"step {shown.step}: {controller.why}")
        assert following.watch is not None
        # The judge goes on with its measurements: a new one would try all collectives again.
        return replace(following, watch=replace(following.watch, judge=lambda _watched: judge))

    return judge
