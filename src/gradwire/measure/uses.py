"""Counts by hooks how often a forward pass uses each weight. ScaleCom's rates per layer follow from that.

Chen et al. 2020, section 4, calls it FLOPs per gradient. Only layers whose arithmetic is known are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.planning.rates import rates_of

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

Uses = Callable[[Any, tuple[Any, ...], Any], float]


def multiply_adds(module: nn.Module, *inputs: Any, **keywords: Any) -> dict[str, float]:
    """Multiply–adds per weight in one forward pass over all samples given, by parameter name.

    Runs `module` once in evaluation mode, without gradients, and restores its modes. Layers that run several
    times, or share their weight, add up. A convolution uses its weight at every position of its output (a
    transposed one: of its input), a linear layer for every vector, a recurrent one at every step. An
    embedding counts its mean number of look-ups. All other parameters, biases among them, are left out.

    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 10))
    >>> multiply_adds(model, torch.zeros(2, 1, 8, 8))
    {'0.weight': 128.0, '2.weight': 2.0}
    """
    counts: dict[int, float] = {}
    with torch.no_grad(), _evaluating(module), _counting(module, counts):
        module(*inputs, **keywords)
    return {name: counts[id(p)] for name, p in module.named_parameters() if id(p) in counts}


def layer_rates(module: nn.Module, *inputs: Any, **keywords: Any) -> dict[str, int]:
    """ScaleCom's rates for the recipe `scalecom`, from one batch as a rank has it in a step.

    By patterns over parameter names. Every rank must come to the same: give batches of equal shapes, or let
    `scalecom(rates="auto")` count in the first forward pass, and agree.

    Example::

        rates = gradwire.measure.layer_rates(module, images)
        model = DistributedDataParallel(module)
        wire = gradwire.attach(model, optimizer, f"scalecom(rates={rates})")

    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 256, 10))
    >>> layer_rates(model, torch.zeros(32, 1, 16, 16))
    {'0.*': 25, '2.*': 400}
    """
    counted = multiply_adds(module, *inputs, **keywords)
    return rates_of({name: counted.get(name, 0.0) for name, p in module.named_parameters() if p.dim() > 1})


class FirstForward:
    """Counter of multiply–adds, as `multiply_adds`, in the first forward pass of a training.

    With gradient accumulation, that is one micro-batch. A layer whose forward pass does not match its class
    is left out.
    """

    def __init__(self, module: nn.Module) -> None:
        self.uses: dict[str, float] = {}
        self._module, self._counts, self._hooks = module, dict[int, float](), ExitStack()

    def begin(self) -> None:
        """Start counting, before a forward pass that trains."""
        self.give_up()
        if not self.uses:
            self._hooks.enter_context(_counting(self._module, self._counts, tolerant=True))

    def give_up(self) -> None:
        """Stop counting, before any other forward pass and after one that failed."""
        self._hooks.close()
        self._counts.clear()

    def end(self) -> None:
        """Note the counts, after the forward pass."""
        self._hooks.close()
        if self._counts:
            self.uses = {
                name: self._counts[id(p)]
                for name, p in self._module.named_parameters()
                if id(p) in self._counts
            }


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Context in which `module` is in evaluation mode, because a count must not change running averages. Each
    part is in its earlier mode afterwards.
    """
    before = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, training in before.items():
            each.training = training


@contextmanager
def _counting(module: nn.Module, counts: dict[int, float], tolerant: bool = False) -> Iterator[None]:
    handles = []
    for each in module.modules():
        uses = next((uses for kinds, uses in _USES.items() if isinstance(each, kinds)), None)
        if uses is not None:
            handles.append(each.register_forward_hook(_hook(uses, counts, tolerant)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(uses: Uses, counts: dict[int, float], tolerant: bool) -> Callable[..., None]:
    def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        try:
            used = uses(layer, inputs, output)
        except Exception:
            if tolerant:
                return
            raise
        for name, parameter in layer.named_parameters():
            if "weight" in name:
                counts[id(parameter)] = counts.get(id(parameter), 0.0) + used

    return hook


def _vectors(layer: nn.Linear, inputs: tuple[Any, ...], output: Tensor) -> float:
    return output.numel() / layer.out_features


def _positions(layer: Any, inputs: tuple[Any, ...], output: Tensor) -> float:
    positions: float = output.numel() / layer.out_channels
    return positions


def _source_positions(layer: Any, inputs: tuple[Any, ...], output: Tensor) -> float:
    positions: float = inputs[0].numel() / layer.in_channels
    return positions


def _look_ups(layer: nn.Embedding, inputs: tuple[Any, ...], output: Tensor) -> float:
    return output.numel() / layer.embedding_dim / layer.num_embeddings


def _steps(layer: nn.RNNBase, inputs: tuple[Any, ...], output: Any) -> float:
    packed = output[0] if isinstance(output[0], Tensor) else output[0].data
    return float(packed.numel() / packed.shape[-1])


def _attended(layer: nn.MultiheadAttention, inputs: tuple[Any, ...], output: Any) -> float:
    """Multiply-adds per weight of an attention layer in a forward pass with this `output`. Its projections
    run inside one function, so their own hooks are not called.
    """
    vectors: float = output[0].numel() / layer.embed_dim
    return vectors


_USES: dict[Any, Uses] = {
    nn.MultiheadAttention: _attended,
    nn.Linear: _vectors,
    _CONVOLUTIONS: _positions,
    _TRANSPOSED: _source_positions,
    nn.Embedding: _look_ups,
    nn.RNNBase: _steps,
}
