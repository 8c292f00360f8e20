"""A user's own model with its batches and loss, named as `package.module:make`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradwire.cli.user_code import made
from gradwire_lab.workloads.base import Parameters, check_rank, seeded

_FORM = "expected (model, batches, loss), or (model, batches, loss, optimizer)"
_LEARNING_RATE = 0.01


def _sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, _LEARNING_RATE)


class _Parts(NamedTuple):
    """The parts that `make()` returns."""

    model: nn.Module
    batches: Callable[[int, int], Iterable[Any]]
    """`batches(rank, world)`: an epoch of that rank's batches. It is called again for the next epoch."""
    loss: Callable[[nn.Module, Any], Tensor]
    """`loss(model, batch)`: the scalar to differentiate. It calls `model`, which may be wrapped, once."""
    optimizer: Callable[[Parameters], torch.optim.Optimizer] = _sgd


class OwnWorkload:
    """Trains what `make()` returns: `(model, batches, loss)`, or with a function for the optimizer as well.

    `batches(rank, world)` gives an epoch of a rank's batches, `loss(model, batch)` the scalar to
    differentiate, and `optimizer(parameters)` the optimizer, which is SGD otherwise. Every rank calls `make`
    once, with torch's generator seeded alike. `ValueError` for anything else that `make` returns.
    """

    bucket_cap_mb = None
    policy = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._made: _Parts | None = None

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            self._made = _parts(self.name)
        return self._made.model

    def optimizer(self, params: Parameters) -> torch.optim.Optimizer:
        return self._parts.optimizer(params)

    def batches(self, rank: int, world: int, seed: int) -> Iterator[Any]:
        check_rank(rank, world)
        return self._endless(self._parts.batches, rank, world)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._parts.loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "data": "the user's own"}

    @property
    def _parts(self) -> _Parts:
        if self._made is None:
            self.model(0)
        assert self._made is not None
        return self._made

    def _endless(self, epoch: Callable[[int, int], Iterable[Any]], rank: int, world: int) -> Iterator[Any]:
        while True:
            count = 0
            for batch in epoch(rank, world):
                count += 1
                yield batch
            if count == 0:
                raise ValueError(f"{self.name}: batches({rank}, {world}) gave none")


def _parts(name: str) -> _Parts:
    found = made(name)
    if not isinstance(found, tuple) or len(found) not in (3, 4):
        raise ValueError(f"{name} returned {type(found).__name__}: {_FORM}")
    parts = _Parts(*found)
    if not isinstance(parts.model, nn.Module) or not all(map(callable, parts[1:])):
        given = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"{name} returned ({given}): {_FORM}, of which all but the model are functions")
    return parts
