"""Pure functions from measured facts to a plan: numbers in, numbers out, no clock and no network."""

from gradwire.plan.cuts import even_cuts, phased_cuts, ramped_cuts
from gradwire.plan.facts import Facts
from gradwire.plan.interval import interval_for
from gradwire.plan.observed import Observed

__all__ = ["Facts", "Observed", "even_cuts", "interval_for", "phased_cuts", "ramped_cuts"]
