"""Networks in numbers: the shapes of their parameters, and what share of the arithmetic is each layer's."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from gradwire.planning.costs import BackwardTiming

PROFILES = Path(__file__).parent / "profiles"
"""One file per published network; `benchmarks/shape_profiles` writes them from the papers' figures."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One layer: shapes of its parameters, and multiply–adds of a forward pass for one sample."""

    name: str
    macs: int
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Profile:
    """Layers in forward order; `source` cites the network."""

    model: str
    source: str
    layers: tuple[Layer, ...]

    @cached_property
    def parameters(self) -> int:
        return sum(math.prod(shape) for layer in self.layers for shape in layer.shapes)

    @property
    def macs(self) -> int:
        """Multiply-adds of one sample's forward pass."""
        return sum(layer.macs for layer in self.layers)


def models() -> list[str]:
    """The networks with a profile."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def load(model: str) -> Profile:
    """The profile of one of `models()`. Hyphens and dots count as underscores. `ValueError` for another.

    >>> load("bert-base").parameters
    109482240
    """
    name = model.lower().replace("-", "_").replace(".", "_").replace("/", "")
    if name not in models():
        near = get_close_matches(name, models(), n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"model={model!r} has no shape profile{meant} Known are {', '.join(models())}")
    return read(PROFILES / f"{name}.json")


def read(path: Path) -> Profile:
    """The profile in a JSON file. Raises `ValueError` for any other file.

    Two forms: {"layers": [[name, multiply-adds per sample, [shape, …]], …]} with "model" and "source" where
    there are any, or {parameter name: shape, …}, both in forward order.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        profile = _of(raw, path.stem)
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise ValueError(
            f'{path}: expected {{"layers": [[name, multiply-adds, [shape, …]], …]}} or {{name: shape, …}}'
        ) from error
    if profile.parameters == 0:
        raise ValueError(f"{path}: there is no parameter")
    return profile


def _of(raw: dict[str, Any], stem: str) -> Profile:
    if "layers" not in raw:
        return Profile(stem, "given shapes", tuple(Layer(name, 0, (_shape(raw[name]),)) for name in raw))
    layers = tuple(
        Layer(str(name), int(macs), tuple(_shape(shape) for shape in shapes))
        for name, macs, shapes in raw["layers"]
    )
    return Profile(raw.get("model", stem), raw.get("source", "given shapes"), layers)


def _shape(sizes: list[int]) -> Shape:
    shape = tuple(int(size) for size in sizes)
    if any(size < 1 for size in shape):
        raise ValueError(f"shape {sizes} must have positive sizes")
    return shape


def ready_of(profile: Profile, before_s: float, backward_s: float, overlap: bool = True) -> BackwardTiming:
    """Ready time of each parameter, in reverse order, by its layer's share of the multiply–adds.

    Parameters of a layer are ready together. If no layer has multiply–adds, all layers take equally long.
    Without `overlap`, everything is ready when the backward pass ends, as under accumulation that
    synchronizes after its last pass.

    >>> profile = Profile("two", "", (Layer("a", 3, ((2, 2),)), Layer("b", 1, ((5,), (1,)))))
    >>> ready_of(profile, 1.0, 4.0)
    BackwardTiming(before_s=1.0, ready_s=(1.0, 1.0, 4.0), numel=(1, 5, 4), total_s=4.0)
    """
    layers = profile.layers[::-1]
    done = list(accumulate(layer.macs if profile.macs else 1 for layer in layers))
    tensors = [
        (backward_s * macs / done[-1] if overlap else backward_s, math.prod(shape))
        for layer, macs in zip(layers, done, strict=True)
        for shape in layer.shapes[::-1]
    ]
    ready_s, numel = zip(*tensors, strict=True)
    return BackwardTiming(before_s, ready_s, numel, backward_s)
