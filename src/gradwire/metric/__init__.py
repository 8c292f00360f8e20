"""How precise a gradient must be for the optimizer that is to take it (GComp's metric δ)."""

from gradwire.metric.optimizers import Numerator, numerator_of, second_moment_factor
from gradwire.metric.unit import SHARE, numerators, thresholds

__all__ = [
    "SHARE",
    "Numerator",
    "numerator_of",
    "numerators",
    "second_moment_factor",
    "thresholds",
]
