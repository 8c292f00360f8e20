"""A wire in checkpoints of `torch.distributed.checkpoint` (DCP), with every rank's memory, on any world.

Example::

    dcp.save({"model": model, "wire": WireState(wire)}, checkpoint_id=folder)
    dcp.load({"model": model, "wire": WireState(wire, folder)}, checkpoint_id=folder)

DCP unpickles what it reads, as it does for the rest of a checkpoint: load only those that you trust.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from gradwire.engine.state import Missing
from gradwire.wire import Wire


class WireState:
    """A `Stateful` for DCP. Without `checkpoint` it is saved, with it loaded.

    A wire alone knows what it remembers now, which need not be what a checkpoint holds: a recipe may have
    been decided since, or the world may be another. So loading looks into `checkpoint` first, a folder or a
    reader. As many ranks as saved read a state each, their own; others read all of them, and start with the
    mean. `key` is where this object stands in the dictionary that DCP is given.
    """

    def __init__(
        self,
        wire: Wire,
        checkpoint: str | os.PathLike[str] | StorageReader | None = None,
        *,
        key: str = "wire",
        missing: Missing = "refuse",
    ) -> None:
        self._wire, self._key, self._missing = wire, key, missing
        self._reader = checkpoint
        if checkpoint is not None and not isinstance(checkpoint, StorageReader):
            self._reader = FileSystemReader(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; to load, empty places for what this rank reads."""
        if self._reader is None:
            return self._wire.state_dict()
        assert isinstance(self._reader, StorageReader), "made one above"
        metadata = self._reader.read_metadata()
        paths = {name: path for name, path in (metadata.planner_data or {}).items() if path[0] == self._key}
        if not paths:
            raise ValueError(f"the checkpoint has no {self._key!r}: it was saved without gradwire's state")
        around = self._wire.attached.backward.engine.around
        ranks = {path[1] for path in paths.values()}
        own = around.shard is None and ranks == {f"rank{each}" for each in range(around.control.world)}
        wanted = {f"rank{around.control.rank}"} if own else ranks
        state: dict[str, Any] = {}
        for name, (_key, *inner, last) in paths.items():
            if inner and inner[0] not in wanted:
                continue
            place, stored = state, metadata.state_dict_metadata[name]
            for part in inner:
                place = place.setdefault(part, {})
            place[last] = None
            if isinstance(stored, TensorStorageMetadata):
                place[last] = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, with the errors of `Wire.load_state_dict`. A collective, as `dcp.load` is."""
        for each in state.values():
            for group in ("memory", "planes", "kept"):  # DCP drops those that are empty
                each.setdefault(group, {})
        self._wire.load_state_dict(state, missing=self._missing)
