"""Waiting for another thread without becoming deaf to signals."""

from __future__ import annotations

import threading
from collections.abc import Callable

_AWAKE_S = 0.5


def wait_for(event: threading.Event, look: Callable[[], None] = lambda: None) -> None:
    """Wait without a limit, but wake up twice a second, for `look` and for signals.

    Python acts on Ctrl-C between two instructions. One that arrives just before an endless wait is noted and
    has no effect until that ends, which may be the timeout of a process group.
    """
    while not event.wait(_AWAKE_S):
        look()
