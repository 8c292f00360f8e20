"""Attempted steps: how many an optimizer has made or left out, so that replicas count alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from gradwire._api.unwrap import Optimizers
from gradwire.sources.observe import Once, leave_out_of_copies, tensors_in
from gradwire.sources.steps import are_zero
from gradwire.sources.untraced import untraced

_Marks: TypeAlias = list[tuple[int, int]]


class Attempts:
    """Counts the attempted steps of one replica, on the thread that trains or autograd's.

    A step has been attempted when all optimizers have stepped; when some have, and the next forward or
    backward pass begins; or when gradients came and were cleared before any optimizer stepped. `ended` is
    called after each, outside of backward passes: if a step turns out to be left out when a pass has begun,
    at its end.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ended: Callable[[], None],
        *,
        before_pass: Callable[[bool], None],
        before_step: Callable[[], None],
        after_step: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        """`before_pass` is called before each forward pass that trains, and told whether it is the first one
        since a step; the others are called around each step.
        """
        self.count = 0
        self._parameters, self._ended = tuple(parameters), ended
        self._on_pass, self._on_step, self._on_stepped = before_pass, before_step, after_step
        self._number = 0
        self._stepped = set[int]()
        self._inside = 0
        """Optimizers whose `step` is running: a closure runs forward and backward passes."""
        self._is_pending = False
        """Whether a backward pass has brought gradients that no optimizer has used."""
        self._is_due = False
        """Whether `ended` is still to be called for the last step."""
        self._handles: list[RemovableHandle] = []
        self._of_optimizers: list[RemovableHandle] = []

    def watch(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Register hooks on `model` and `optimizers`, for as long as the model lives."""
        hooks = [
            model.register_forward_pre_hook(untraced(self._before_forward), prepend=True),
            model.register_forward_hook(untraced(self._after_forward)),
        ]
        leave_out_of_copies(model, hooks)
        self._handles += hooks
        self.follow(optimizers)
        weakref.finalize(model, _remove, self._handles).atexit = False

    def follow(self, optimizers: Optimizers) -> None:
        """Count the steps of `optimizers`, and no longer those of others."""
        if self._stepped:  # by some of several, and the others will not
            self._complete()
        _remove(self._of_optimizers)
        self._number, self._of_optimizers = len(optimizers), []
        for number, optimizer in enumerate(optimizers):
            self._of_optimizers += [
                optimizer.register_step_pre_hook(untraced(lambda *_: self._before_step())),
                optimizer.register_step_post_hook(
                    untraced(lambda one, *_, of=number: self._after_step(one, of))
                ),
            ]
        self._handles += self._of_optimizers

    def retire(self) -> None:
        """Count no more."""
        _remove(self._handles)

    def drop(self) -> None:
        """The user leaves the step out. Raises `ValueError` if no gradient waits for an optimizer."""
        if not self._is_pending:
            raise ValueError(
                "there is no step to leave out: call drop_step() after a backward pass of the model, "
                "instead of the optimizer's step"
            )
        self._complete()

    def forget(self, count: int) -> None:
        """Another state was loaded, of so many attempted steps."""
        self.count, self._is_pending, self._is_due = count, False, False
        self._stepped.clear()

    def _complete(self) -> None:
        self.count += 1
        self._is_pending, self._is_due = False, True
        self._stepped.clear()
        self._catch_up()

    def _catch_up(self) -> None:
        if self._is_due and torch._C._current_graph_task_id() == -1:
            self._is_due = False
            self._ended()

    def _close(self) -> None:
        """Another pass begins: the step before it is over, if one was made, or nothing is left of it."""
        self._catch_up()
        if not self._inside and (self._stepped or (self._is_pending and self._are_cleared())):
            self._complete()

    def _before_forward(self, model: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            if model.training and not self._inside:
                self._on_pass(not self._is_pending)
            self._close()

    def _after_forward(self, _model: nn.Module, _inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            entered = Once(self._entered)
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(entered)  # type: ignore[no-untyped-call]

    def _entered(self) -> None:
        """A backward pass has begun. It may be one of `autograd.grad`, which brings no gradient."""
        self._close()
        before = self._marks()

        def passed() -> None:
            self._is_pending |= self._marks() != before
            if self._is_due:
                self._is_due = False
                self._ended()

        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(passed)

    def _marks(self) -> _Marks:
        """A mark of the gradients that there are: any that is made or added to changes it."""
        grads = [each.grad for each in self._parameters]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]

    def _are_cleared(self) -> bool:
        """A device is not read for zeros."""
        there: list[Tensor] = [each.grad for each in self._parameters if each.grad is not None]
        return not there or (all(each.is_cpu for each in there) and are_zero(there))

    def _before_step(self) -> None:
        self._on_step()
        self._inside += 1

    def _after_step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        self._inside -= 1
        self._on_stepped(optimizer)
        if number in self._stepped:  # no pass was seen between its two steps
            self._complete()
        self._stepped.add(number)
        if len(self._stepped) == self._number:
            self._complete()


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
