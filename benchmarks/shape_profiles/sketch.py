"""Layers of a network as parameter shapes and multiply-adds per sample, by arithmetic alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass
class Sketch:
    """A network under construction: (name, multiply-adds per sample, shapes), in forward order."""

    source: str
    layers: list[tuple[str, int, list[Shape]]] = field(default_factory=list)

    def add(self, name: str, macs: int, *shapes: Shape) -> None:
        self.layers.append((name, macs, list(shapes)))

    def conv(
        self,
        name: str,
        inputs: int,
        outputs: int,
        kernel: int,
        pixels: int,
        *,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        """A square convolution whose output has `pixels` places."""
        weight = (outputs, inputs // groups, kernel, kernel)
        self.add(name, math.prod(weight) * pixels, weight, *[(outputs,)] * bias)

    def norm(self, name: str, width: int) -> None:
        """Scale and shift; their arithmetic is nothing beside the layer that they follow."""
        self.add(name, 0, (width,), (width,))

    def linear(
        self, name: str, inputs: int, outputs: int, places: int = 1, *, bias: bool = True, extra: int = 0
    ) -> None:
        """A linear layer applied at `places` positions; `extra` multiply-adds are those of attention."""
        self.add(name, inputs * outputs * places + extra, (outputs, inputs), *[(outputs,)] * bias)

    def embedding(self, name: str, entries: int, width: int) -> None:
        self.add(name, 0, (entries, width))

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, _, shapes in self.layers for shape in shapes)

    def to_json(self, model: str) -> str:
        """One line per layer, so that a change can be read in a diff."""
        rows = ",\n".join("  " + json.dumps(layer, separators=(",", ":")) for layer in self.layers)
        head = f'"model": {json.dumps(model)},\n"source": {json.dumps(self.source)},\n'
        return f'{{\n{head}"parameters": {self.parameters},\n"layers": [\n{rows}\n]\n}}\n'
