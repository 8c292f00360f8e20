"""How strictly each layer may be sparsified: by multiply-adds per weight.

Chen et al. 2020, "ScaleCom: scalable sparsified gradient compression for communication-efficient distributed
training", section 4: a weight that takes part in many multiply-adds averages over as many positions, so that
its gradient is dense in information, and cheap to send beside its computation.

Differences from the paper: it gives its three ranges for batches of 32 samples, or 4.5k tokens, per worker
and says that rates are adjusted to other batches, not how. Here the multiply-adds of a whole step count, in
batches of 32: twice the batch is twice the computation that a gradient's transmission can hide behind. For
4.5k tokens that gives 141 multiply-adds per weight of a linear layer, and so 50x, which is what the paper
reports for its transformer (47x).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

BATCH = 32
"""Samples per worker for which the paper's ranges are given."""

RATES = ((196.0, 25), (128.0, 50), (0.0, 400))
"""More multiply-adds per weight and sample than the first number allow the second, the rate; descending."""


def rate_for(
    multiply_adds_per_weight: float,
    batch: float = BATCH,
    *,
    reference_batch: float = BATCH,
    rates: tuple[tuple[float, int], ...] = RATES,
) -> int:
    """One of how many elements of a layer is to travel.

    `multiply_adds_per_weight` is per sample: height times width of a convolution's output, 1 for a linear
    layer. `batch` is the worker's; `reference_batch` that for which `rates` are given.

    >>> [rate_for(side * side) for side in (56, 28, 14, 7, 1)]
    [25, 25, 50, 400, 400]
    >>> rate_for(7 * 7, batch=128), rate_for(1, batch=4500)
    (50, 50)
    """
    if not batch > 0 or not reference_batch > 0:
        raise ValueError(f"batch={batch} and reference_batch={reference_batch} must be positive")
    scaled = multiply_adds_per_weight * batch / reference_batch
    return next((rate for bound, rate in rates if scaled > bound), rates[-1][1])


def overall_rate(layers: Iterable[tuple[int, float]], batch: float = BATCH) -> float:
    """What a network's (weights, multiply-adds per sample) come to: all weights over those that travel.

    >>> overall_rate([(100, 0.0), (100, 1e6)])
    47.05882352941177
    """
    counted = [(weights, macs) for weights, macs in layers if weights]
    sent = sum(weights / rate_for(macs / weights, batch) for weights, macs in counted)
    return sum(weights for weights, _macs in counted) / sent if sent else 1.0


def patterns_of(rates: Mapping[str, int]) -> dict[str, int]:
    """The same rates by glob patterns over parameter names, the first match counting, as few as possible.

    A module whose parameters all have one rate becomes a single pattern.

    >>> patterns_of({"a.0.weight": 25, "a.1.weight": 25, "b.weight": 50, "b.bias": 400, "c": 400})
    {'a.*': 25, 'b.weight': 50, 'b.bias': 400, 'c': 400}
    """
    inside: dict[str, dict[str, int]] = {}
    for name, rate in rates.items():
        head, _, rest = name.partition(".")
        inside.setdefault(head, {})[rest] = rate
    found: dict[str, int] = {}
    for head, named in inside.items():
        if set(named) == {""}:
            found[head] = named[""]
        elif len(set(named.values())) == 1:
            found[f"{head}.*"] = next(iter(named.values()))
        else:
            found |= {f"{head}.{pattern}": rate for pattern, rate in patterns_of(named).items()}
    return found
