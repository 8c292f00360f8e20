"""Training until another rank dies: when this one hears of it, and what."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.process.attached_models import ddp
from tests.support.models import train


def until_it_breaks(text: str) -> dict[str, Any]:
    """Train and say so, until `backward()` raises. Nothing is read on a device then: it may never come."""
    model, optimizer, _wire = ddp(text)
    step = 0
    while True:
        try:
            train(model, optimizer, range(step, step + 1))  # type: ignore[arg-type]
        except Exception as error:
            return {"error": type(error).__name__, "text": str(error), "raised_s": time.monotonic()}
        step += 1
        print(step, flush=True)  # the part waits until training is under way


SCENES: dict[str, Callable[[], Any]] = {text: partial(until_it_breaks, text) for text in ("int8", "dense")}
