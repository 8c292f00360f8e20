"""Attempted steps: how many an optimizer has made or left out, so that replicas count alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
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
from gradwire.step.optimizers import are_zero, listen, parameters_of, stop_listening
from gradwire.untraced import untraced

_Marks: TypeAlias = list[tuple[int, int]]


class Attempts:
    """Counter of one replica's attempted steps, on the thread that trains or autograd's.

    A step has been attempted in three cases:

    - all optimizers have stepped, or others with their parameters, such as the one inside Lookahead;
    - some have stepped, and the next forward or backward pass begins;
    - gradients came, and were cleared before any optimizer stepped. If parameters were written in between,
      the gradients have been used: that is the first half of a sharpness-aware step, and no attempt.

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
        self.count = 0
        self._parameters, self._ended = tuple(parameters), ended
        self._on_pass, self._on_step, self._on_stepped = before_pass, before_step, after_step
        self._versions: list[int] = []
        """Versions of the parameters after the last backward pass."""
        self._held = weakref.ref(optimizers)
        self._is_pending = False
        """True if a backward pass has brought gradients that no optimizer has used."""
        self._is_half = False
        """True if gradients were cleared after parameters had been written, as in the first half of a
        sharpness-aware step."""
        self._is_due = False
        """True if `ended` is still to be called for the last attempt."""
        self._handles: list[RemovableHandle] = []

    @property
    def _optimizers(self) -> LocalOptimizers:
        held = self._held()
        assert held is not None, "asked while the model or the wire is there"
        return held

    def watch(self, model: nn.Module) -> None:
        """Register hooks on `model`, which hold the optimizers, for as long as it lives."""
        # FSDP brings gradients past the hooks of shards: there the outputs tell that a pass begins.
        whole = [each for each in self._parameters if not isinstance(each, DTensor)]
        self._entrance = Entrance(model, self._entered, whole)
        self._entrance.watch()
        hooks = [
            model.register_forward_pre_hook(
                untraced(partial(self._before_forward, self._optimizers)), prepend=True
            ),
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
        has_begun = self._has_begun  # by some of several, and the others will not
        self._optimizers.inner = optimizers
        if has_begun:
            self._complete()
        self._forget_stepped()

    def written(self) -> None:
        """Parameters were written by gradwire, or loaded: that uses no gradient."""
        self._versions = self._versions_now()

    def retire(self) -> None:
        """Stop counting, and remove all hooks."""
        remove(self._handles)
        self._entrance.unwatch()
        stop_listening(self)

    def drop(self) -> None:
        """Complete the present step without an optimizer, as the user asks. Raises `ValueError` if no
        gradient waits for an optimizer.
        """
        if not self._is_pending:
            raise ValueError(
                "there is no step to leave out: call drop_step() after a backward pass of the model, "
                "instead of the optimizer's step"
            )
        self._complete()

    def forget(self, count: int) -> None:
        """Go on from a loaded state, with `count` attempted steps and none begun."""
        self.count, self._is_pending, self._is_due, self._is_half = count, False, False, False
        self._forget_stepped()

    def _forget_stepped(self) -> None:
        self._optimizers.stepped.clear()
        self._optimizers.running.clear()

    def _complete(self) -> None:
        self.count += 1
        self._is_pending, self._is_due, self._is_half = False, True, False
        self._optimizers.stepped.clear()
        self._catch_up()

    def _catch_up(self) -> None:
        if self._is_due and torch._C._current_graph_task_id() == -1:
            self._is_due = False
            self._ended()

    def _close(self) -> None:
        """End the attempt that came before a new pass, if any."""
        self._catch_up()
        if self._optimizers.running:
            return
        if self._has_begun:
            self._complete()
        elif self._is_pending and self._are_cleared():
            if self._versions == self._versions_now() or self._is_half:
                self._complete()
            else:
                self._is_half = True
            self._is_pending = False
        self._optimizers.stepped.clear()

    @property
    def _has_begun(self) -> bool:
        """True if some optimizer has begun a step. An optimizer that was not given counts only while its step
        runs.
        """
        stepped = self._optimizers.stepped
        return bool(stepped) and (self._is_pending or not stepped.isdisjoint(self._optimizers.inner))

    def _before_forward(self, optimizers: LocalOptimizers, model: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            if model.training and not optimizers.running:
                self._on_pass(not self._is_pending)
            self._close()

    def _entered(self) -> None:
        """Note that a backward pass has begun. It may be one of `autograd.grad`, which brings no gradient.

        A graph may outlive the model, or the wire of a model that is detached: then nothing is counted.
        """
        if self._held() is None:
            return
        self._close()
        before = self._marks()

        def passed() -> None:
            self._is_pending |= self._marks() != before
            try:
                if self._is_due:
                    self._is_due = False
                    self._ended()  # a round that lands writes parameters, too
            finally:
                self._versions = self._versions_now()

        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(passed)

    def _marks(self) -> _Marks:
        """Identities and versions of the present gradients: a new gradient, or an addition to one,
        changes them.
        """
        grads = [each.grad for each in self._parameters]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]

    def _versions_now(self) -> list[int]:
        return [each._version for each in self._parameters]

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
        if (held := self._held()) is None:
            return
        running = held.running
        if optimizer in running:
            running.clear()  # its last step has raised
        if not parameters_of(optimizer).isdisjoint(map(id, self._parameters)):
            self._on_step()
            running.add(optimizer)

    def optimizer_ended(self, optimizer: torch.optim.Optimizer, _found_inf: Tensor | None) -> None:
        """Note that an optimizer has stepped, or skipped its step: both count. One inside another makes no
        step of its own.
        """
        if (held := self._held()) is None:
            return
        stepped, running = held.stepped, held.running
        if optimizer not in running:
            return
        running.remove(optimizer)
        self._on_stepped(optimizer)
        if running:
            return
        if optimizer in stepped and self._has_begun:  # no pass was seen between its two steps
            self._complete()
        stepped.add(optimizer)
        if self._have_all_stepped():
            self._complete()

    def _have_all_stepped(self) -> bool:
        """True if all given optimizers have stepped, or others with their parameters."""
        given, stepped = self._optimizers.inner, self._optimizers.stepped
        left = [each for each in given if each not in stepped]
        others = stepped.difference(given)
        return not left or (bool(others) and parameters_of(*left) <= parameters_of(*stepped))


def _shown_to(entrance: Entrance) -> Callable[..., None]:
    def hook(_model: nn.Module, _inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            entrance.show(outputs)

    return hook
