"""Scenes of which one breaks its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def fine() -> dict[str, Any]:
    return {"digest": "equal", "says": f"{dist.get_world_size()} ranks", "wrong": ""}


def breaks() -> dict[str, Any]:
    if dist.get_rank() == 1:
        raise ValueError("out of luck")
    return fine()


SCENES: dict[str, Callable[[], Any]] = {"before": fine, "breaks": breaks, "after": fine}
