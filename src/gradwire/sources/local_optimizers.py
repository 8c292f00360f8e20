"""The optimizers of a replica that takes local steps, which end with its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradwire.sources.sharded import ShardedParameters
from gradwire.sources.unwrap import Optimizers, optimizers_of
from gradwire.step.optimizers import local

OuterFactory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of the shared parameters, which it is given."""


class LocalOptimizers:
    """The optimizers of one replica: `inner` ones make the local steps, the `outer` one those of θ₀.

    The model's hooks and the wire hold this object; sources refer to it weakly. A hook of the user's on an
    optimizer may refer to the model, and the thread that refers to the source ends with the model.
    """

    outer: torch.optim.Optimizer
    """There from `make_outer` on."""

    def __init__(self, given: object, make: OuterFactory) -> None:
        """`given` are the user's optimizers, as `outer` takes them. `make` makes the outer optimizer."""
        self._given, self._make = given, make
        self.inner: Optimizers = ()
        self._began: Mapping[Any, Any] = {}

    def make_outer(self, shared: list[nn.Parameter]) -> None:
        """Look for the inner optimizers in what was given, and make the outer one, of the parameters
        `shared`. Raises `ValueError` where either cannot be.
        """
        self.inner, self._given = optimizers_of(self._given), None  # these go once others take over
        if not self.inner:
            raise ValueError("outer() counts an optimizer's steps: write outer(model, optimizer, …)")
        self.outer = self._make(shared)
        if not isinstance(self.outer, torch.optim.Optimizer):
            raise ValueError(
                f"outer= made a {type(self.outer).__name__}; it takes a function that makes an optimizer "
                "of the parameters that it is given: outer=lambda given: torch.optim.SGD(given, lr=1.0)"
            )
        stepped = {id(each) for group in self.outer.param_groups for each in group["params"]}
        if stepped != set(map(id, shared)):
            raise ValueError("outer= made an optimizer of other parameters than those that it was given")

    def note_began(self) -> None:
        """Keep the outer optimizer's state, for `begin_outer_anew`."""
        self._began = deepcopy(self.outer.state_dict()["state"])

    def begin_outer_anew(self) -> None:
        """Give the outer optimizer the state back with which it began; its rates stay."""
        groups = self.outer.state_dict()["param_groups"]
        self.outer.load_state_dict({"state": deepcopy(self._began), "param_groups": groups})

    def make_finite(self) -> None:
        """Reset the state of each trained parameter that has a value which is not finite: to zeros, as most
        optimizers begin.
        """
        for state in [each for optimizer in self.inner for each in optimizer.state.values()]:
            tensors = {key: local(each) for key, each in state.items() if isinstance(each, Tensor)}
            if all(bool(each.isfinite().all()) for each in tensors.values()):
                continue
            for each in tensors.values():
                each.zero_()
            if isinstance(state.get("step"), int | float):
                state["step"] = 0

    # -- checkpoints

    def inner_states(self) -> list[dict[str, Any]]:
        """`state_dict()` of each inner optimizer, of sharded tensors this rank's part."""
        return [_local_state(each.state_dict()) for each in self.inner]

    def require_fit(self, outer: Mapping[str, Any], inner: list[Mapping[str, Any]] | None) -> None:
        """Raise `ValueError` unless saved states have the optimizers and groups that are here."""
        _require_fits("the outer optimizer", outer, self.outer)
        if inner is None:
            return
        if len(inner) != len(self.inner):
            raise ValueError(f"state has {len(inner)} optimizers, and outer() was given {len(self.inner)}")
        for each, optimizer in zip(inner, self.inner, strict=True):
            _require_fits("an optimizer", each, optimizer)

    def load(self, outer: Mapping[str, Any], inner: list[Mapping[str, Any]] | None) -> None:
        """Go on from saved states, for which `require_fit` was called."""
        self.outer.load_state_dict(dict(outer))
        for each, optimizer in zip(inner or (), self.inner, strict=False):
            optimizer.load_state_dict(_sharded_state(optimizer, each))


def require_steps_alone(optimizers: Optimizers) -> None:
    """Raise `ValueError` for optimizers that a round cannot go on from."""
    for each in optimizers:
        if all(callable(getattr(each, mode, None)) for mode in ("train", "eval")):
            raise ValueError(
                f"{type(each).__name__} has train() and eval(), as schedule-free optimizers do: it keeps "
                "parameters of its own, which a round would not reach. Take an optimizer that steps the "
                "model's parameters alone, or gradwire.attach, which averages gradients"
            )


def _require_fits(what: str, saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        raise ValueError(f"the state of {what} has groups of {theirs} parameters, and here they have {ours}")


def _local_state(found: dict[str, Any]) -> dict[str, Any]:
    state = {
        number: {key: local(each) if isinstance(each, Tensor) else each for key, each in of.items()}
        for number, of in found["state"].items()
    }
    return {**found, "state": state}


def _sharded_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: tensors in the shape of this rank's part of a parameter are sharded like it."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def placed(parameter: Tensor, each: Any) -> Any:
        if isinstance(parameter, DTensor) and isinstance(each, Tensor) and each.ndim:
            return ShardedParameters.sharded_as(parameter, each)
        return each

    state = {
        number: {key: placed(parameters[number], each) for key, each in of.items()}
        for number, of in saved["state"].items()
    }
    return {**saved, "state": state}
