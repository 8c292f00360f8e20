"""The options `fused` and `layers` of several recipes: units as papers have them."""

from __future__ import annotations

from gradwire.planning.boundaries import one_unit, whole_layer_boundaries
from gradwire.recipes.base import Cutter


def fused_cutter(fused: bool) -> Cutter | None:
    """One choice from the whole gradient, without overlap, or one in each of the units as usual.

    >>> fused_cutter(False) is None
    True
    """
    return one_unit if _asked("fused", fused) else None


def layer_cutter(layers: bool) -> Cutter | None:
    """Cutter of units of whole parameters, if `layers`; `None` for the usual units, which divide some
    parameters.

    >>> layer_cutter(True)((60_000, 20_000, 20_000))
    (60000, 80000)
    """
    return whole_layer_boundaries if _asked("layers", layers) else None


def _asked(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is neither True nor False")
    return value
