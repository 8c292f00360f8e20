"""`OuterWire`, the handle on a model whose replicas take local steps; methods that `outer` knows by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradwire._api.parts import Attached, OwnGradients, OwnRanks, Steps, Watch, lacking
from gradwire._api.wire import Wire
from gradwire.errors import GradwireError
from gradwire.recipes import Composition, Recipe
from gradwire.recipes import recipe as parsed
from gradwire.sources.local_optimizers import LocalOptimizers, OuterFactory
from gradwire.sources.local_steps import LocalSteps
from gradwire.sources.unwrap import Optimizers

_diloco: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""Douillard et al. 2023: the outer optimizer of DiLoCo."""


_NO_RESULT = "the last round ended without a result, as something was not finite"


@dataclass(frozen=True)
class Method:
    """A published method: its recipe, and its outer optimizer."""

    recipe: str
    outer: OuterFactory


METHODS: dict[str, Method] = {
    "diloco": Method("dense", _diloco),
    "sparseloco": Method("sparseloco", partial(torch.optim.SGD, lr=1.0)),
}
"""Methods by name, as `outer` knows them; any other recipe has the outer optimizer of DiLoCo."""


def method_of(recipe: str | Recipe | Composition) -> tuple[str | Recipe | Composition, OuterFactory]:
    """The recipe that travels, and its outer optimizer, for a recipe as `outer` is given it."""
    if isinstance(recipe, str) and recipe.strip() in METHODS:
        method = METHODS[recipe.strip()]
        return method.recipe, method.outer
    try:
        name = parsed(recipe).name
    except ValueError:  # which all ranks will hear of
        name = ""
    return recipe, METHODS[name].outer if name in METHODS else _diloco


_NO_GRADIENTS = lacking(
    "flush() adds to gradients, which replicas keep to themselves here: detach() sends what is unsent"
)


class RoundsOfRanks(OwnRanks):
    """Calls that a fixed set of replicas makes together."""

    def __init__(self, attached: Attached, local: LocalSteps) -> None:
        super().__init__(attached)
        self._local = local

    def _make_ready(self) -> None:
        """Wait for a round under way, too."""
        self._backward.settle()

    def switch(self, recipe: str | Recipe | Composition) -> None:
        travels, _outer = method_of(recipe)
        super().switch(travels)

    @contextmanager
    def join(self) -> Iterator[None]:
        yield
        local = self._local
        local.land_now()
        all_finished: bool | None = False
        while not all_finished:
            local.rounds.send(finished=True)
            lands, all_finished = local.rounds.receive()
            if all_finished is None:
                raise GradwireError(_NO_RESULT)
            if lands:
                local.rounds.step()
        local.attempts.forget(-(-local.attempts.count // local.every) * local.every)


class OuterWire(Wire):
    """The handle on one model of which replicas take local steps. Its methods are for the training thread.

    It is a `Wire` whose steps are rounds. Calls for all ranks may be made between any two attempted steps,
    the same on all ranks.
    """

    _ranks: RoundsOfRanks

    def __init__(
        self, local: LocalSteps, optimizers: LocalOptimizers, steps: Steps, watch: Watch, ranks: RoundsOfRanks
    ) -> None:
        super().__init__(steps, watch, ranks, _NO_GRADIENTS)
        self._local, self._optimizers = local, optimizers

    def _change(self, optimizers: Optimizers) -> None:
        self._local.attempts.change(optimizers)

    @property
    def attempts(self) -> int:
        """Attempted steps so far: those that an optimizer made, and those that were left out."""
        return self._local.attempts.count

    @property
    def outer_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the shared parameters; a schedule of its rate must be the same on all ranks."""
        return self._optimizers.outer

    def shared_parameters(self) -> AbstractContextManager[None]:
        """Within it the model has the shared parameters, as they were after the last round, for evaluation.

        Afterwards this replica's own are put back, bit for bit. It sends nothing.

        Example::

            with wire.shared_parameters(), torch.no_grad():
                evaluate(model)
        """
        return self._local.showing_shared()

    def join(self) -> AbstractContextManager[None]:
        """Within it, replicas may attempt different numbers of steps. A collective at its end.

        A replica that has finished takes part in the others' rounds. When all have finished, all have landed
        the last round, and have the same parameters.

        Example::

            with wire.join():
                for batch in loader:
                    train_one_step(batch)
        """
        return self._ranks.join()

    def drop_step(self) -> None:
        """Leave this step out: call it after `backward()`, instead of `optimizer.step()`.

        It counts as attempted, and so may run a round. Other replicas need not leave theirs out. Raises
        `ValueError` if no gradient waits for an optimizer.

        Example::

            loss = loss_of(batch)
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            else:
                wire.drop_step()
            optimizer.zero_grad()
        """
        self._local.attempts.drop()

    def detach(self) -> None:
        """Land a round in flight, make a last round that sends everything unsent, and stop. A collective.

        All replicas end with the shared parameters of that round, and then train by themselves.

        Example::

            wire.detach()
            torch.save(model.state_dict(), "model.pt")
        """
        local, rounds, reducer = self._local, self._local.rounds, self.attached.reducer
        local.land_now()
        self._backward.together("detach()", rounds.agree)
        lands = rounds.has_learned
        if lands:
            rounds.send()
            _lands, all_finished = rounds.receive()
            if all_finished is None:
                raise GradwireError(_NO_RESULT)
        lands |= not reducer.layout.is_plain
        retired = OwnGradients(self.attached).flush("detach()", reducer.retired)
        self._backward.call(lambda: reducer.restore(retired))
        if lands:
            rounds.step()
        rounds.sync_from_shared()
        local.retire()

    def log_to(self, target: Any, *, every: int = 1) -> None:
        """As `Wire.log_to`, at the end of each `every`-th round.

        Example::

            wire.log_to(SummaryWriter())
        """
        super().log_to(target, every=every)
