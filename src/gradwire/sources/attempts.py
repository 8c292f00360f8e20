"""Attempted steps: how many an optimizer has made or left out, so that replicas count alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from gradwire.sources.local_optimizers import LocalOptimizers
from gradwire.sources.observe import Entrance, leave_out_of_copies, remove
from gradwire.sources.unwrap import Optimizers
from gradwire.step.events import Changed, Dropped, KnownOptimizer, StepBegan, StepEnded, StepRaised
from gradwire.step.optimizers import are_zero, is_stepping, listen, parameters_of, stop_listening
from gradwire.untraced import untraced

Versions: TypeAlias = tuple[int, ...]
"""Versions of a replica's parameters: writing to one changes its version."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A forward pass that trains, or a backward pass, has begun. `cleared_at` are the versions of the
    parameters if all gradients are gone, or zeros on the CPU; `None` if not, or if nobody needs to know.
    """

    cleared_at: Versions | None = None


@dataclass(frozen=True, slots=True)
class Brought:
    """A backward pass has brought gradients. One of `autograd.grad` brings none."""


@dataclass(frozen=True, slots=True)
class Written:
    """Parameters have these versions when a backward pass has ended, or once gradwire or a load has written
    them, which uses no gradient.
    """

    versions: Versions


@dataclass(frozen=True, slots=True)
class Resumed:
    """A state was loaded, of `count` attempted steps."""

    count: int


AttemptEvent: TypeAlias = (
    Entered | Brought | Written | Resumed | StepBegan | StepEnded | StepRaised | Dropped | Changed
)


@dataclass(slots=True)
class Attempted:
    """The attempted steps of a replica, and what was seen since the last one."""

    count: int = 0
    given: tuple[KnownOptimizer, ...] = ()
    versions: Versions = ()
    """Versions of the parameters after the last backward pass."""
    is_pending: bool = False
    """True if a backward pass has brought gradients that no optimizer has used."""
    is_half: bool = False
    """True if gradients were cleared after parameters had been written, as in the first half of a
    sharpness-aware step."""
    stepped: list[KnownOptimizer] = field(default_factory=list)
    """Optimizers that have stepped since the last attempt, also ones that were not given."""
    running: list[KnownOptimizer] = field(default_factory=list)
    """Optimizers whose `step` is running: a closure runs forward and backward passes."""


def read(state: Attempted, event: AttemptEvent) -> None:
    """Fold `event` into `state`.

    A step has been attempted in three cases:

    - all optimizers have stepped, or others with their parameters, such as the one inside Lookahead;
    - some have stepped, and the next forward or backward pass begins;
    - gradients came, and were cleared before any optimizer stepped. If parameters were written in between,
      the gradients have been used: that is the first half of a sharpness-aware step, and no attempt.
    """
    match event:
        case Entered(cleared_at) if not state.running:
            if has_begun(state):
                _complete(state)
            elif state.is_pending and cleared_at is not None:
                if state.versions == cleared_at or state.is_half:
                    _complete(state)
                else:
                    state.is_half, state.is_pending = True, False
            state.stepped.clear()
        case Brought():
            state.is_pending = True
        case Written(versions):
            state.versions = versions
        case StepBegan(optimizer):
            if optimizer in state.running:
                state.running.remove(optimizer)  # its last step has raised
            state.running.append(optimizer)
        case StepEnded(optimizer) if optimizer in state.running:
            state.running.remove(optimizer)
            if state.running:
                return  # one inside another makes no step of its own
            if optimizer in state.stepped and has_begun(state):  # no pass was seen between its two steps
                _complete(state)
            state.stepped.append(optimizer)
            if have_all_stepped(state):
                _complete(state)
        case StepRaised(optimizer):
            state.running.remove(optimizer)
        case Dropped():
            _complete(state)
        case Resumed(count):
            state.count, state.is_pending, state.is_half = count, False, False
            state.stepped.clear()
            state.running.clear()
        case Changed(optimizers):
            if has_begun(state):  # by some of several, and the others will not
                _complete(state)
            state.given = optimizers
            state.stepped.clear()
            state.running.clear()


def has_begun(state: Attempted) -> bool:
    """True if some optimizer has stepped. One that was not given counts only if gradients came."""
    return bool(state.stepped) and (state.is_pending or any(each in state.stepped for each in state.given))


def have_all_stepped(state: Attempted) -> bool:
    """True if all given optimizers have stepped, or others with their parameters."""
    left = [each for each in state.given if each not in state.stepped]
    if not left:
        return True
    others = any(each not in state.given for each in state.stepped)
    parameters = {name for each in state.stepped for name in each.names}
    return others and all(each.names <= parameters for each in left)


def needs_look(state: Attempted) -> bool:
    """True if it matters to a pass that begins whether gradients were cleared."""
    return state.is_pending and not state.running and not has_begun(state)


def _complete(state: Attempted) -> None:
    state.count += 1
    state.is_pending = state.is_half = False
    state.stepped.clear()


class _Stepper(KnownOptimizer):
    """An optimizer, to which it refers weakly, with the ids of all of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, is_given: bool) -> None:
        super().__init__(is_given=is_given)
        self.reference = weakref.ref(optimizer)
        self.look_up()

    def look_up(self) -> None:
        """Look up its parameters: users add and change parameter groups while training."""
        if (optimizer := self.reference()) is not None:
            self.names = frozenset(parameters_of(optimizer))


class Attempts:
    """Log of one replica's passes and optimizer steps, on the thread that trains or autograd's.

    `ended` is called after each attempt, outside of backward passes. If an attempt is recognised only when a
    pass has begun, `ended` is called at the end of the pass.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizers: LocalOptimizers,
        ended: Callable[[], None],
        *,
        before_pass: Callable[[bool], None],
        before_step: Callable[[], None],
        after_step: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        """Follow the optimizers of `parameters`.

        Args:
            parameters: the replica's trained parameters.
            optimizers: the replica's optimizers.
            ended: called after each attempt, outside of backward passes.
            before_pass: called before each forward pass that trains, with True for the first one since a
                step.
            before_step: called before an optimizer's step.
            after_step: called after it, with the optimizer.
        """
        self.state = Attempted()
        self._parameters, self._ended = tuple(parameters), ended
        self._ids = frozenset(map(id, self._parameters))
        self._on_pass, self._on_step, self._on_stepped = before_pass, before_step, after_step
        self._held = weakref.ref(optimizers)
        self._given: tuple[_Stepper, ...] = ()
        self._told = 0
        """Attempts after which `ended` was called."""
        self._handles: list[RemovableHandle] = []

    @property
    def count(self) -> int:
        """The number of attempted steps."""
        return self.state.count

    def _append(self, event: AttemptEvent) -> None:
        """Append an event that may complete an attempt."""
        read(self.state, event)
        if self._told != self.state.count and torch._C._current_graph_task_id() == -1:
            self._tell()

    def _tell(self) -> None:
        self._told = self.state.count
        self._ended()

    def _follow(self, optimizers: Optimizers) -> None:
        self._given = tuple(_Stepper(each, is_given=True) for each in optimizers)
        self._append(Changed(self._given))

    def watch(self, model: nn.Module) -> None:
        """Register hooks on `model`, which hold the optimizers, for as long as it lives."""
        held = self._held()
        assert held is not None, "asked while the model or the wire is there"
        self._follow(held.inner)
        # FSDP brings gradients past the hooks of shards: there the outputs tell that a pass begins.
        whole = [each for each in self._parameters if not isinstance(each, DTensor)]
        self._entrance = Entrance(model, self._entered, whole)
        self._entrance.watch()
        hooks = [
            model.register_forward_pre_hook(untraced(partial(self._before_forward, held)), prepend=True),
            model.register_forward_hook(untraced(_shown_to(self._entrance))),
        ]
        leave_out_of_copies(model, hooks)
        self._handles = hooks
        weakref.finalize(model, remove, hooks).atexit = False
        listen(self, model)

    def change(self, optimizers: Optimizers) -> None:
        """Count the steps of `optimizers` from now on, and of others that have their parameters. A step that
        only some of the previous optimizers have made is completed.
        """
        held = self._held()
        assert held is not None, "asked while the model or the wire is there"
        held.inner = optimizers
        self._follow(optimizers)

    def written(self) -> None:
        """Parameters were written by gradwire, or loaded: that uses no gradient."""
        read(self.state, Written(self._versions()))

    def retire(self) -> None:
        """Stop counting, and remove all hooks."""
        remove(self._handles)
        self._entrance.unwatch()
        stop_listening(self)

    def drop(self) -> None:
        """Complete the present step without an optimizer, as the user asks. Raises `ValueError` if no
        gradient waits for an optimizer.
        """
        if not self.state.is_pending:
            raise ValueError(
                "there is no step to leave out: call drop_step() after a backward pass of the model, "
                "instead of the optimizer's step"
            )
        self._append(Dropped())

    def forget(self, count: int) -> None:
        """Go on from a loaded state, with `count` attempted steps and none begun."""
        self._told = count
        read(self.state, Resumed(count))

    def _before_forward(self, _held: LocalOptimizers, model: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._look_for_raised()
            if model.training and not self.state.running:
                self._on_pass(not self.state.is_pending)
            self._begin()

    def _begin(self) -> None:
        """Note that a pass begins, outside of which an attempt that was recognised late may be told."""
        if self._told != self.state.count and torch._C._current_graph_task_id() == -1:
            self._tell()
        is_needed = needs_look(self.state) and self._are_cleared()
        self._append(Entered(self._versions() if is_needed else None))

    def _entered(self) -> None:
        """Note that a backward pass has begun. It may be one of `autograd.grad`, which brings no gradient.

        A graph may outlive the model, or the wire of a model that is detached: then nothing is counted.
        """
        if self._held() is None:
            return
        self._look_for_raised()
        self._begin()
        before = self._marks()

        def passed() -> None:
            if self._marks() != before:
                read(self.state, Brought())
            try:
                if self._told != self.state.count:
                    self._tell()  # a round that lands writes parameters, too
            finally:
                read(self.state, Written(self._versions()))

        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(passed)

    def _marks(self) -> list[tuple[int, int]]:
        """Identities and versions of the present gradients: a new gradient, or an addition to one,
        changes them.
        """
        grads = [each.grad for each in self._parameters]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]

    def _versions(self) -> Versions:
        return tuple([each._version for each in self._parameters])

    def _are_cleared(self) -> bool:
        """True if no parameter has a gradient, or all gradients are zeros on the CPU. A device is not read
        for zeros.
        """
        there: list[Tensor] = [each.grad for each in self._parameters if each.grad is not None]
        return not there or (all(each.is_cpu for each in there) and are_zero(self._parameters))

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is about to step. One that was not given may be inside another, or
        around it.

        Any optimizer of the process may step while the model goes: then nothing is counted.
        """
        if self._held() is None or self._ids.isdisjoint(parameters_of(optimizer)):
            return
        self._look_for_raised()
        self._on_step()
        read(self.state, StepBegan(self._stepper(optimizer) or _Stepper(optimizer, is_given=False)))

    def optimizer_ended(self, optimizer: torch.optim.Optimizer, _found_inf: Tensor | None) -> None:
        """Note that an optimizer has stepped, or skipped its step: both count."""
        found = self._stepper(optimizer)
        if self._held() is None or found is None or found not in self.state.running:
            return
        self._on_stepped(optimizer)
        if not found.is_given:
            for each in (found, *self._given):
                each.look_up()
        self._append(StepEnded(found))

    def _look_for_raised(self) -> None:
        """Note which steps have raised. In a usual step none has begun when anything else is seen."""
        for each in [*self.state.running]:
            assert isinstance(each, _Stepper)
            if not is_stepping(each.reference()):
                read(self.state, StepRaised(each))

    def _stepper(self, optimizer: torch.optim.Optimizer) -> _Stepper | None:
        """The optimizer, if it was given or has begun a step since the last attempt."""
        for each in (*self.state.given, *self.state.stepped, *self.state.running):
            if isinstance(each, _Stepper) and each.reference() is optimizer:
                return each
        return None


def _shown_to(entrance: Entrance) -> Callable[..., None]:
    def hook(_model: nn.Module, _inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            entrance.show(outputs)

    return hook
