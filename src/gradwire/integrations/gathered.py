"""The states of all ranks in one, for frameworks that write a single file from rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from gradwire.wire import Wire


class Gathered:
    """A `Wire` as savers see it that ask every rank for a state and keep rank 0's.

    Both methods are collectives. Saving sends every rank's state to rank 0, one gradient's size per rank and
    plane; where a checkpoint is a folder, `gradwire.integrations.rank_files` sends nothing.

    Example, with Lightning Fabric::

        state = {"model": model, "optimizer": optimizer, "wire": Gathered(wire)}
        fabric.save("checkpoint.ckpt", state)
        fabric.load("checkpoint.ckpt", state)
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks on rank 0, and an empty list on all others."""
        group = self._wire.attached.source.group
        is_first = dist.get_rank(group) == 0
        states: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
        dist.gather_object(self._wire.state_dict(), states, group=group, group_dst=0)
        return {"ranks": states or []}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take up this rank's own, or on another number of ranks the mean; see `Wire.load_state_dict`."""
        self._wire.load_state_dict(saved.get("ranks", saved))
