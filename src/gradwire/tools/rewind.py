"""Everything that a training step changes, copied in memory and put back bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn

Restore = Callable[[], None]


class Stateful(Protocol):
    """A scheduler, a scaler, a sampler: whatever saves and loads a state of its own."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


@contextmanager
def rewound(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), also: Sequence[Stateful] = ()
) -> Iterator[Restore]:
    """Undo afterwards all that happens inside; the function that it yields does so in between, too.

    Covers parameters, their gradients, buffers, the optimizers' state and options, the global generators of
    torch (all devices), numpy and Python, and whatever is in `also`.

    >>> layer = nn.Linear(1, 1)
    >>> before = layer.weight.item()
    >>> with rewound(layer):
    ...     _ = layer.weight.data.zero_()
    >>> layer.weight.item() == before
    True
    """
    restores = [_tensors(module), _generators(), *(_stateful(each) for each in also)]
    restores += [_optimizer(optimizer) for optimizer in optimizers]

    def restore() -> None:
        for each in restores:
            each()

    try:
        yield restore
    finally:
        restore()


def _tensors(module: nn.Module) -> Restore:
    """Restore in place, because DDP and the optimizer hold these very tensors."""
    held: list[tuple[Tensor, Tensor]] = [
        (tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())
    ]
    # The same tensor where it was: under gradient_as_bucket_view it is a view of DDP's bucket.
    grads = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in module.parameters()]

    @torch.no_grad()
    def restore() -> None:
        for tensor, saved in held:
            tensor.copy_(saved)
        for parameter, grad, was in grads:
            parameter.grad = grad
            if grad is not None and was is not None:
                grad.copy_(was)

    return restore


def _optimizer(optimizer: torch.optim.Optimizer) -> Restore:
    """Not by its own `load_state_dict`, which casts state to the parameters' types."""
    state = {parameter: copy.deepcopy(dict(kept)) for parameter, kept in optimizer.state.items()}
    options = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

    def restore() -> None:
        optimizer.state.clear()
        for parameter, kept in state.items():
            optimizer.state[parameter] = copy.deepcopy(kept)
        for group, saved in zip(optimizer.param_groups, options, strict=True):
            group.update(copy.deepcopy(saved))

    return restore


def _generators() -> Restore:
    cpu, python, arrays = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        numpy.random.set_state(arrays)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def _stateful(each: Stateful) -> Restore:
    saved = copy.deepcopy(each.state_dict())
    return lambda: each.load_state_dict(copy.deepcopy(saved))
