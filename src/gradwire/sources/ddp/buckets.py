"""DDP's buckets as the engine sees them: which parameters lie where in a flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from torch import Tensor, nn

from gradwire.arena import ParameterSpec
from gradwire.engine.arrival import Arrival, Entry


class Bucket(Protocol):
    """The part of `torch.distributed.GradBucket` that is used; tests bring their own."""

    def index(self) -> int: ...
    def buffer(self) -> Tensor: ...
    def parameters(self) -> Sequence[Tensor]: ...
    def is_last(self) -> bool: ...


class BucketMap:
    """From DDP's buckets to parameter names.

    Buckets are looked at anew each time, because DDP rebuilds them; only under `join()` does a finished
    rank get buckets without parameters, which then are those it saw last.
    """

    def __init__(self, module: nn.Module, specs: Sequence[ParameterSpec]) -> None:
        known = {spec.name for spec in specs}
        self._names = {id(p): name for name, p in module.named_parameters() if name in known}
        self._seen: dict[int, tuple[Entry, ...]] = {}
        self._keys: dict[int, list[int]] = {}

    def arrival(self, bucket: Bucket) -> Arrival:
        """Describe `bucket`. Raises `ValueError` if the buffer does not hold its parameters densely."""
        buffer, index = bucket.buffer(), bucket.index()
        entries = self._entries(index, bucket.parameters())
        if buffer.is_sparse or buffer.numel() != sum(entry.numel for entry in entries):
            raise ValueError(
                f"bucket {index} of {buffer.numel()} elements is sparse or does not match its parameters; "
                "use sparse=False in embeddings"
            )
        return Arrival(buffer, entries, index)

    def _entries(self, index: int, parameters: Sequence[Tensor]) -> tuple[Entry, ...]:
        key = [id(p) for p in parameters]
        if key and key != self._keys.get(index):
            self._keys[index] = key
            unknown = [tuple(p.shape) for p in parameters if id(p) not in self._names]
            if unknown:
                raise ValueError(
                    f"bucket {index} holds parameters of shape {unknown} that were frozen when gradwire "
                    "was attached; freeze before building DistributedDataParallel"
                )
            offsets = accumulate((p.numel() for p in parameters), initial=0)
            self._seen[index] = tuple(
                Entry(self._names[id(p)], offset, p.numel())
                for p, offset in zip(parameters, offsets, strict=False)
            )
        return self._seen[index]
