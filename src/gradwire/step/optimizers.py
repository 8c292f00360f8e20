"""Follower of all optimizers: it reports when each begins to step, and when it has stepped or skipped the
step.

Two logs hear of it. `OptimizerLog` (`step/optimizer_log.py`) asks which gradients an optimizer has used: a
step that a scaler skipped used none. `Attempts` (`sources/attempts.py`) asks how often a replica has tried to
step: a skipped step counts, so that replicas count alike. Both recognise cleared gradients by `are_zero`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradwire.untraced import untraced

_GLANCE = 1024
"""Elements that are read first; most often they show that a gradient is not zero."""


class Reader(Protocol):
    """Reader that is told of the steps of every optimizer in this process, on the thread that calls
    `step`.
    """

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that `optimizer` is about to step. One optimizer may step inside the step of another."""

    def optimizer_ended(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        """Note that `optimizer` has stepped. A fused one has skipped its step, on the device, if `found_inf`
        is not zero.
        """


_READERS: weakref.WeakValueDictionary[int, Reader] = weakref.WeakValueDictionary()
"""Readers in the order in which they began to listen, which must be the same on all ranks, as some make
rounds then."""


def listen(reader: Reader, model: nn.Module) -> None:
    """Tell `reader` of all steps, until it or `model` is gone.

    No optimizer keeps the reader alive. The hooks stay: torch must not lose one while it iterates over them.
    """
    _hear_of_all()
    if id(reader) not in _READERS:
        _READERS[id(reader)] = reader
        weakref.finalize(model, _forget, weakref.ref(reader)).atexit = False


def stop_listening(reader: Reader) -> None:
    """Stop telling `reader` of steps. Does nothing if it is told of none."""
    _READERS.pop(id(reader), None)


def _forget(reader: weakref.ref[Reader]) -> None:
    if (listening := reader()) is not None:
        stop_listening(listening)


@cache
def _hear_of_all() -> None:
    register_optimizer_step_pre_hook(untraced(_begins))
    register_optimizer_step_post_hook(untraced(_ended))


def _begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for reader in list(_READERS.values()):
        reader.optimizer_begins(optimizer)


def _ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # A scaler leaves its word on a fused optimizer while that steps.
    found = getattr(optimizer, "found_inf", None)
    for reader in list(_READERS.values()):
        reader.optimizer_ended(optimizer, found if isinstance(found, Tensor) else None)


_HOOKED = torch.optim.Optimizer.profile_hook_step(len).__code__
_STEP = (_HOOKED.co_filename, _HOOKED.co_firstlineno)
"""Place of the function in which torch runs a step and its hooks. Where a step is compiled, another code may
stand for it, of the same place, which has kept the arguments alone."""


def is_stepping(optimizer: torch.optim.Optimizer | None) -> bool:
    """True if a step of `optimizer` runs. torch calls no hook if a step raises.

    Any thread may ask: autograd calls hooks on its own while the caller of `backward()` waits.
    """
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            code = caller.f_code
            is_step = (code.co_filename, code.co_firstlineno) == _STEP
            if is_step and any(each is optimizer for each in caller.f_locals.get("args", ())):
                return True
            caller = caller.f_back
    return False


def parameters_of(*optimizers: torch.optim.Optimizer) -> set[int]:
    """The ids of their parameters. Looked up anew: users add and change parameter groups while training."""
    found = set[int]()
    for each in optimizers:
        for group in each.param_groups:
            found.update(map(id, group["params"]))
    return found


def local(gradient: Tensor) -> Tensor:
    """The part of a gradient on this rank."""
    to_local = getattr(gradient, "to_local", None)
    here: Tensor = gradient if to_local is None else to_local()
    return here.detach()


def are_zero(parameters: Collection[Tensor]) -> bool:
    """True if all elements of all gradients are zero. Parameters without a gradient do not count.

    Most often the first elements of the first gradient show that they are not.
    """
    for limit in (_GLANCE, None):
        for each in parameters:
            if each.grad is not None and bool(local(each.grad).flatten()[:limit].any()):
                return False
    return True
