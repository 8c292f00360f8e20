"""Pure functions from measured facts to a plan: numbers in, numbers out, no clock and no network."""

from gradwire.plan.cuts import even_cuts, fixed_cuts, layer_cuts, phased_cuts, ramped_cuts
from gradwire.plan.facts import Facts
from gradwire.plan.interval import interval_for
from gradwire.plan.observed import Observed, Watched

__all__ = [
    "Facts",
    "Observed",
    "Watched",
    "even_cuts",
    "fixed_cuts",
    "interval_for",
    "layer_cuts",
    "phased_cuts",
    "ramped_cuts",
]
