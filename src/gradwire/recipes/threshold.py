"""threshold: everything above a fixed magnitude (Strom 2015, "Scalable distributed DNN training using
commodity GPU cloud computing").

Differences from the paper: values travel as they are, not as plus or minus the threshold; no rank sends more
than a stated share.
"""

from gradwire.codec.select.fixed import fixed_threshold
from gradwire.exchange.agreed import agreed
from gradwire.exchange.compose import remember
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import Values, dtype_of


@register
def threshold(threshold: float = 0.001, at_most: float = 0.1, values: Values = "full") -> Composition:
    """All elements above a fixed threshold with error feedback, all-gathered in the largest size.

    Travels: counts; then places and values, as many as the rank with the most has.
    Paper: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing".
    Use when: comparing with it: the right threshold differs between models, layers and epochs.
    """
    return Composition(remember(agreed(fixed_threshold(threshold, at_most), dtype_of(values))))
