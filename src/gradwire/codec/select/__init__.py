"""Selectors: which elements travel; one method per file."""

from gradwire.codec.select.base import Selector, check_ratio, count_kept
from gradwire.codec.select.everything import Everything, everything
from gradwire.codec.select.ramp import Ramp, ramp
from gradwire.codec.select.random import RandomK, random_k
from gradwire.codec.select.topk import TopK, top_k

__all__ = [
    "Everything",
    "Ramp",
    "RandomK",
    "Selector",
    "TopK",
    "check_ratio",
    "count_kept",
    "everything",
    "ramp",
    "random_k",
    "top_k",
]
