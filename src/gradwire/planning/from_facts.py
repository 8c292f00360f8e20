"""A step of a plan, from facts that were measured on dense ones: what `predict` needs, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradwire.planning.collectives import Sends
from gradwire.planning.costs import Backward
from gradwire.planning.facts import Facts
from gradwire.planning.groups import units_between
from gradwire.planning.predict import FREE, Prediction, Tail, predict


def step_from_facts(
    facts: Facts,
    places: Sequence[int],
    cuts: Sequence[int],
    rounds: Callable[[int, int], tuple[Sends, ...]],
    tail: Tail | None = None,
) -> Prediction | None:
    """A step in which the parameters at `places` of the layout travel in units between element `cuts`.

    `rounds(index, numel)` names a unit's collectives. A codec whose cost is no fact is taken to be free.
    `None` where nobody has looked at ready times or at links.

    >>> from gradwire.planning.collectives import Transfer
    >>> from gradwire.planning.costs import Link, Network
    >>> backward = Backward(1.0, (0.5, 0.75, 2.0), (10, 1, 30), 2.0)
    >>> facts = Facts(2.0, 0.0, 2, backward, Network(Link(alpha_s=0.5, beta_s=0.0)))
    >>> found = step_from_facts(facts, (0, 2), (10,), lambda _index, _numel: (Transfer("shift", 1.0),))
    >>> found.step_s, found.exposed_s
    (3.5, 0.5)
    """
    every = facts.backward
    if every is None or facts.network is None:
        return None
    ready_s, numel = (tuple(column[place] for place in places) for column in (every.ready_s, every.numel))
    backward = Backward(every.before_s, ready_s, tuple(map(int, numel)), every.total_s)
    units = units_between(backward, cuts, rounds, facts.codec or FREE, facts.payloads)
    return predict(units, every.total_s, facts.world, facts.network, before_s=every.before_s, tail=tail)
