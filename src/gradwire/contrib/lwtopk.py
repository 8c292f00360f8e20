"""LWTopk: every rank sends the largest magnitudes of each parameter alone. Every layer keeps its share, so
that layers with small gradients are heard.

Aji and Heafield 2017, "Sparse communication for distributed gradient descent"; compared with in Shi et al.
2019, "A distributed synchronous SGD algorithm with global top-k sparsification", and in Tyagi and Swany
2023, "Flexible communication for optimal distributed learning over unpredictable networks", section 2-C3, who
find that with non-uniform layers a choice over the whole gradient loses less.

Differences from the papers:

- Layers that share a unit share one collective.
- A parameter that a boundary divides keeps its share in each of the two units. With `layers` none is divided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import gather
from gradwire.kernels.topk import topk_indices
from gradwire.laws import Laws
from gradwire.recipes.base import Composition, register
from gradwire.recipes.narrow import CodedValues, coded
from gradwire.recipes.units import layer_cutter
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class LayerTopK:
    """The largest magnitudes of each piece, exactly, at least one of each; among equals the lowest index."""

    ratio: float
    laws = Laws(contractive=True, fixed_size=True, stays_on_device=True, fixed_rounds=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return sum(count_kept(self.ratio, size) for size in ctx.sizes(numel))

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        start, parts = 0, []
        for piece in x.split_with_sizes(ctx.sizes(x.numel())):
            parts.append(ctx.kernels[topk_indices](piece, count_kept(self.ratio, piece.numel())) + start)
            start += piece.numel()
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def layer_top_k(ratio: float) -> LayerTopK:
    """Keep the share `ratio` of each parameter, that with the largest magnitudes.

    >>> x = torch.tensor([9.0, 8.0, 7.0, 0.1, 0.2])
    >>> from gradwire.unit.context import Part
    >>> parts = Part("weight", (3,), 0, 3), Part("bias", (2,), 0, 2)
    >>> layer_top_k(0.4).select(x, ExchangeContext(step=0, unit=0, rank=0, world=1, parts=parts))
    tensor([0, 4])
    """
    return LayerTopK(check_ratio(ratio))


@register
def lwtopk(ratio: float = 0.01, values: CodedValues = "full", layers: bool = False) -> Composition:
    """Every rank's own top-k of each layer with error feedback, all-gathered.

    Travels: indices and values of every rank's own choice, the share `ratio` of each layer.
    Paper: Aji and Heafield 2017, "Sparse communication for distributed gradient descent".
    Use when: gradients of some layers are so small that a choice over all layers would hardly ever send them.
        Tyagi and Swany find the opposite: if layers differ, a choice over the whole gradient loses less.

    Args:
        ratio: share of a layer's elements to send, above 0 and at most 1.
        values: "full" sends values in the gradient's type; other names shorten them.
        layers: cut units between parameters only. By default a large one may be divided, and then each part
            is selected from separately.
    """
    exchange = remember(gather(coded(layer_top_k(ratio), values)))
    return Composition(exchange, layer_cutter(layers))
