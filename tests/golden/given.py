"""Models whose gradients are given, and what a rank says of a moment: for all scenes of `steps.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SHAPES: dict[str, tuple[int, ...]] = {
    "first.weight": (37, 61),
    "first.bias": (61,),
    "nothing.weight": (0, 4),
    "middle.weight": (53, 41),
    "scalar.weight": (),
    "last.weight": (47, 59),
    "last.bias": (59,),
}
"""Prime sides, so that boundaries fall inside parameters; in the order of registration."""

ARRIVE = (
    "scalar.weight", "last.weight", "first.bias", "first.weight", "last.bias", "middle.weight",
    "nothing.weight",
)  # fmt: skip
"""The order in which gradients come. It is not that of registration, so DDP groups them anew in its second
step, and in another order than before."""


# -- what goes in


def gradients(rank: int, number: int) -> dict[str, Tensor]:
    """Normal numbers that depend on rank, number and place alone; no element is zero."""
    drawn = {}
    for place, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(10_000 * rank + 100 * number + place)
        values = torch.randn(torch.Size(shape).numel(), generator=generator, dtype=torch.float64)
        drawn[name] = (values + values.sign() * 0.01).float().view(shape)
    return drawn


class Given(nn.Module):
    """Parameters whose gradients are those that the forward pass is given."""

    def __init__(
        self, narrow: Sequence[str] = (), seed: int = 7, names: Sequence[str] = tuple(SHAPES)
    ) -> None:
        """Parameters of `names`; those that begin with one of `narrow` are bfloat16."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in names:
            home, leaf = name.split(".")
            if not hasattr(self, home):
                self.add_module(home, nn.Module())
            dtype = torch.bfloat16 if name.startswith(tuple(narrow)) else torch.float32
            values = torch.randn(SHAPES[name], generator=generator).to(dtype)
            getattr(self, home).register_parameter(leaf, nn.Parameter(values))

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        """The sum of all parameters times their gradients; what is used last has its gradient first."""
        own = dict(self.named_parameters())
        used = [name for name in reversed(ARRIVE) if name in own]
        products = [(own[name] * grads[name].to(own[name].dtype)).sum() for name in used]
        return torch.stack([each.float() for each in products]).sum()


Change = Callable[[dict[str, Tensor]], None]


def nothing(_grads: dict[str, Tensor]) -> None:
    """Gradients stay as they are drawn."""


# -- what comes out


def digest(value: Any) -> str:
    """A hash of tensors, numbers and words in dictionaries and lists; all NaNs are alike."""
    hashed = hashlib.blake2b(digest_size=6)

    def feed(each: Any) -> None:
        if isinstance(each, Mapping):
            for key in sorted(each, key=str):
                hashed.update(f"{key}:".encode())
                feed(each[key])
        elif isinstance(each, Tensor):
            hashed.update(f"{each.dtype}{tuple(each.shape)}".encode())
            flat = each.detach().reshape(-1)
            if flat.is_floating_point():
                flat = flat.masked_fill(flat.isnan(), float("nan"))
            hashed.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(each, list | tuple):
            for one in each:
                feed(one)
            hashed.update(f"{len(each)};".encode())
        else:
            hashed.update(f"{each!r};".encode())

    feed(value)
    return hashed.hexdigest()


class Row(NamedTuple):
    """What one rank has at one moment."""

    moment: str
    means: str = ""
    sent: str = ""
    memory: str = ""
    raised: str = ""


Tell = Callable[[Row], None]


@dataclass(frozen=True)
class Play:
    """A scene that makes its own models. It is called with a recipe's text, and tells rows."""

    run: Callable[[str, Tell], None]
    texts: tuple[str, ...]
    worlds: tuple[int, ...]
