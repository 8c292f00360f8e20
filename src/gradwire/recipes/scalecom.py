"""scalecom: one rank in turn selects for all ranks, with a low-pass filter on the memory.

Chen et al. 2020, "ScaleCom: scalable sparsified gradient compression for communication-efficient distributed
training": CLT-k (section 2, equation 3), the low-pass filter (equation 5), chunk-wise selection and rates per
layer (section 4), a dense start.

Differences from the paper:

- The leader's top-k of each layer is exact, as CLT-k is defined; the paper sorts by chunks, to save time.
  `keep` selects by chunks here, too: the `keep` largest of every keep·rate elements, which are spread over
  the layer (`gradwire.codec.select.rates`).
- An all-reduce of packed indices broadcasts them (`gradwire.exchange.leader`), with no parameter server.
- The order of leaders is drawn again every three cycles (`gradwire.exchange.round_robin`), unless it is
  "paper".
- A layer that the boundary of a unit divides has a choice in each of the two units, unless `layers` keeps it
  whole.
- Vectors and tiny tensors are sent densely.
- The memory holds gradients as they came, and the optimizer multiplies late gradients by its present rate.
  The paper's text speaks of gradients "after scaling by step size", so its memory would contain the rate of
  their own step. Both agree at a constant rate. The other variant is not possible: only the optimizer knows
  the rate, and its update (momentum, Adam) is not proportional to it.
- The dense start lasts `warmup_steps`, not one to five epochs, whose length is unknown here.
- All layers have the same `rate`, unless `rates` gives others. `rates="auto"` computes them from the uses of
  each weight in the first forward pass.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from gradwire.codec.select.rates import rated_top_k
from gradwire.exchange.compose import remember, warm
from gradwire.exchange.leader import leader
from gradwire.exchange.round_robin import Order
from gradwire.memory import LowPass
from gradwire.planning.facts import Facts
from gradwire.planning.rates import rates_of
from gradwire.recipes.base import Composition, Decision, register
from gradwire.recipes.dense import measured_for
from gradwire.recipes.narrow import Values, dtype_of
from gradwire.recipes.units import layer_cutter


@register
def scalecom(
    rate: int = 100,
    rates: dict[str, int] | Literal["auto"] | None = None,
    beta: float = 1.0,
    keep: int | None = None,
    warmup_steps: int = 200,
    values: Values = "full",
    *,
    layers: bool = False,
    order: Order = "random",
) -> Composition:
    """One leader's largest of every layer for all ranks, in turn, with low-pass error feedback.

    Travels: one rank's choice of places, a share of each layer, and all ranks' values there.
    Paper: Chen et al. 2020, "ScaleCom".
    Use when: one element in 25 to 400 of each layer is enough, on any number of ranks. The paper has
        beta=0.1 to 0.3 where the learning rate is scaled up with the batch.

    Args:
        rate: elements of a layer for each one that is sent.
        rates: other rates for some layers, by patterns over parameter names; "auto" computes them in the
            first forward pass.
        beta: share of the unsent part that enters the memory (`gradwire.memory.LowPass`); 1 is plain error
            feedback.
        keep: select the `keep` largest of every keep·rate elements; by default the largest of each layer.
        warmup_steps: steps at the beginning that send gradients densely.
        values: "full" sums values in the gradient's type; "fp16" and "bf16" shorten them.
        layers: whether units hold whole layers only, so that each layer has one choice.
        order: "random" draws the order of the turns anew every three cycles. In the order "paper", rank t mod
            n leads in step t.
    """
    if isinstance(rates, str):
        if rates != "auto":
            raise ValueError(f"rates={rates!r} is neither 'auto' nor rates by patterns over names")
        with_rates = partial(
            scalecom,
            rate,
            beta=beta,
            keep=keep,
            warmup_steps=warmup_steps,
            values=values,
            layers=layers,
            order=order,
        )
        with_rates()  # refuses wrong options now
        return measured_for(Decision(partial(_rated, with_rates), uses=True))
    chosen = leader(rated_top_k(rate, rates, keep), dtype=dtype_of(values), order=order)
    return Composition(remember(warm(warmup_steps, chosen), LowPass(beta)), layer_cutter(layers))


def _rated(with_rates: Callable[..., Composition], facts: Facts) -> Composition:
    """scalecom with rates per layer, by how often the layer's weights are used (`facts.uses`). `with_rates`
    makes the composition.
    """
    rates = rates_of(facts.uses or {})
    chosen = with_rates(rates=rates)
    counted = f"rates by multiply-adds per weight: {rates}" if rates else "no use of any weight was counted"
    return replace(chosen, why=f"{counted}; other layers at the recipe's rate")
