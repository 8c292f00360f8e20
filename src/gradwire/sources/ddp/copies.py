"""Copies and pickles of an attached model: those of a DDP without a hook, as if gradwire were not there."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


def leave_out_of_copies(ddp: DistributedDataParallel, hooks: Iterable[RemovableHandle]) -> None:
    """Keep the communication hook, and `hooks` on the forward pass, out of the state that `ddp` hands over.

    A copy cannot share what they refer to: a thread, a process group, and what is unsent of this very model's
    gradients. `copy` and `pickle` ask the object for its `__getstate__`, so it gets one of its own.
    """
    ours = frozenset(hook.id for hook in hooks)
    instance: Any = ddp
    original = weakref.WeakMethod(instance.__getstate__)  # a reference to itself would keep the model

    def state_without_gradwire() -> dict[str, Any]:
        getstate = original()
        assert getstate is not None, "asked by the model"
        state: dict[str, Any] = getstate()
        del state["__getstate__"]
        state["_comm_hooks"] = []
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            state[name] = OrderedDict(item for item in state[name].items() if item[0] not in ours)
        return state

    instance.__getstate__ = state_without_gradwire
