"""Shape profiles: what a published network looks like to the wire, without its memory."""

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

PROFILES = Path(__file__).parent / "profiles"
_THIN = 16

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One layer's parameter shapes and its multiply-adds for one sample, forward."""

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
    """The profile of one of `models()`."""
    raw = json.loads((PROFILES / f"{model}.json").read_text(encoding="utf-8"))
    layers = tuple(
        Layer(name, macs, tuple(tuple(shape) for shape in shapes)) for name, macs, shapes in raw["layers"]
    )
    return Profile(raw["model"], raw["source"], layers)


def shrunk(profile: Profile, factor: float) -> Profile:
    """The same layers with about `profile.parameters / factor` parameters.

    All tensors lose the same share, vectors in their length and others in their first two dimensions: what
    norms and biases are of all bytes stays as published. `ValueError` where tensors are too thin for that.
    """
    if factor == 1:
        return profile
    if not factor >= 1:
        raise ValueError(f"shrink={factor} must be at least 1")
    target = profile.parameters / factor
    # rounding, and tensors too thin to lose their share, make the total miss: correct the share twice
    divisor = factor
    for _ in range(2):
        divisor *= _divided(profile, divisor).parameters / target
    made = _divided(profile, divisor)
    if abs(made.parameters / target - 1) > 0.1:
        raise ValueError(f"shrink={factor} is too much for {profile.model}: some of its tensors are too thin")
    return made


def _divided(profile: Profile, divisor: float) -> Profile:
    layers = tuple(
        replace(layer, shapes=tuple(_smaller(shape, divisor) for shape in layer.shapes))
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def _smaller(shape: Shape, divisor: float) -> Shape:
    """Both of the first two dimensions lose the root of `divisor`, so that a matrix keeps its proportions."""
    if len(shape) == 1:
        return (max(1, round(shape[0] / divisor)),)
    rows, columns, *rest = shape
    # a dimension of 2, 3 or 10 keeps its length; what rounding adds or takes there, the rows make good
    share = divisor if rows <= _THIN else 1.0 if columns <= _THIN else math.sqrt(divisor)
    thin = max(1, round(columns / share))
    return (max(1, round(rows * columns / divisor / thin)), thin, *rest)
