"""Shape profiles: what a published network looks like to the wire, without its memory."""

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

PROFILES = Path(__file__).parent / "profiles"
SMALL = 16_384  # elements; tensors up to this size keep their shape when a profile is shrunk

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

    Tensors of at most `SMALL` elements (norms, biases) stay as they are; all others lose the same share, in
    their first two dimensions. A profile whose small tensors alone exceed the target raises `ValueError`.
    """
    if factor == 1:
        return profile
    if not factor > 0:
        raise ValueError(f"shrink={factor} must be at least 1")
    target = profile.parameters / factor
    sizes = [math.prod(shape) for layer in profile.layers for shape in layer.shapes]
    small = sum(size for size in sizes if size <= SMALL)
    if factor < 1 or small > 0.9 * target:
        highest = int(0.9 * profile.parameters / max(small, 1))
        raise ValueError(f"shrink={factor} must be between 1 and {highest} for {profile.model}")
    # rounding, and tensors too thin to lose their share, make the total miss: correct the share twice
    divisor = (profile.parameters - small) / (target - small)
    for _ in range(2):
        made = _divided(profile, divisor)
        divisor *= (made.parameters - small) / (target - small)
    return _divided(profile, divisor)


def _divided(profile: Profile, divisor: float) -> Profile:
    layers = tuple(
        replace(layer, shapes=tuple(_smaller(shape, divisor) for shape in layer.shapes))
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def _smaller(shape: Shape, divisor: float) -> Shape:
    """Both of the first two dimensions lose the root of `divisor`, so that a matrix keeps its proportions."""
    if math.prod(shape) <= SMALL:
        return shape
    if len(shape) == 1:
        return (max(1, round(shape[0] / divisor)),)
    rows, columns, *rest = shape
    # a dimension of 3 or 10 keeps its length; what rounding adds or takes there, the rows make good
    thin = max(1, round(columns / math.sqrt(divisor))) if columns > 16 else columns
    return (max(1, round(rows * columns / divisor / thin)), thin, *rest)
