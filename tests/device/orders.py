"""Every place where gradwire puts work of streams in order, and that place without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tests.support.removed import Mention, mentions
from tests.support.simulated import Simulated, SimulatedEvent

TORCHS = (
    "record", "record_event", "wait_event", "wait_stream", "synchronize", "_accelerator_setStream",
    "set_device_index"
)  # fmt: skip
OURS = ("using", "landing", "reading", "working", "at_work", "follow", "join", "ready")
"""What orders work in streams: methods of torch's, and those of a device or a placement."""
OTHERS = {
    ("step/flat_buffers.py", "self.working"),
    ("comm/progress.py", "thread.join"),
    ("comm/threads.py", "thread.join"),
    ("step/reducer.py", "self.follow"),
    ("step/worker.py", "self._thread.join"),
    ("kernels/background.py", "os.pathsep.join"),
    ("kernels/device/common.py", "tl.join"),
    ("_api/attach.py", "level.join"),
    ("_api/moving.py", "membership.join"),
    ("_api/rounds.py", "self._ranks.join"),
    ("_api/stored.py", "membership.join"),
    ("members/bucket/all_ranks.py", "former.join"),
    ("members/bucket/all_ranks.py", "self._thread.join"),
    ("members/bucket/check.py", "each.join"),
    ("members/membership.py", "self._timer.join"),
    ("members/steps.py", "self.follow"),
    ("sources/local_steps.py", "self.follow"),
    ("sources/outer.py", "self.values.join"),
    ("sources/buffers.py", "each.landing"),
    ("sources/buffers.py", "self.landing"),
}
"""Of these names, what has nothing to do with streams, by file."""


def orders() -> list[Mention]:
    """All mentions of such a name."""
    return mentions(frozenset(TORCHS + OURS))


def places() -> list[Mention]:
    """All of them, but for `OTHERS`."""
    return [each for each in orders() if (each.path, each.text) not in OTHERS]


def nothing(owner: Any, name: str) -> Callable[..., Any]:
    """What stands for the method `name` of `owner` where it is taken out."""
    if name == "record_event":
        return lambda event=None: SimulatedEvent(Simulated()) if event is None else event
    if name == "at_work":
        return lambda function: function()
    if name in ("using", "landing", "reading", "working"):
        return lambda *_: nullcontext()
    return lambda *_: None
