"""A wire in checkpoints of `torch.distributed.checkpoint` (DCP), with every rank's memory, on any world.

Example::

    import torch.distributed.checkpoint as dcp

    from gradwire.integrations.dcp import WireState

    dcp.save({"model": model, "wire": WireState(wire)}, checkpoint_id=folder)
    dcp.load({"model": model, "wire": WireState(wire, folder)}, checkpoint_id=folder)

Where ranks hold shards, a checkpoint has the memory of each replica, each a `DTensor` over its ranks. A rank
reads its own shard alone: of its own replica or, where their number has changed, of all.

DCP unpickles what it reads, as it does for the rest of a checkpoint: load only those that you trust.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut

from gradwire._api.fsdp import FSDPWire
from gradwire._api.wire import Wire
from gradwire.agreement.agree import on_all_ranks
from gradwire.checkpoint.state import Missing, mean_of, single
from gradwire.comm import gathered
from gradwire.step.shards import Shard
from gradwire.unit.parameters import ParameterSpec, layout_hash

T = TypeVar("T")
_Stored: TypeAlias = Mapping[tuple[Any, ...], Any]
"""DCP's metadata of each stored value, by its path in the dictionary."""

_REPLICA = "replica"
_PLANES = ("memory", "planes")
_ALIKE = ("format", "plan", "why", "step", "stays", "following", "stepped", "health")
"""Keys of values that all ranks have alike. Older checkpoints lack some."""


class WireState:
    """`Stateful` of a wire for DCP: without `checkpoint` it is saved, with `checkpoint` it is loaded.

    The wire knows its present memory, which need not be that of the checkpoint: a recipe may have been
    decided since, or the number of ranks may be another. So loading reads the metadata of `checkpoint` first,
    a folder or a reader. If as many ranks with as many shards saved, each rank reads its own state; otherwise
    each reads all states, and starts with the mean. `key` is the key of this object in the dictionary that
    DCP is given.
    """

    def __init__(
        self,
        wire: Wire,
        checkpoint: str | os.PathLike[str] | StorageReader | None = None,
        *,
        key: str = "wire",
        missing: Missing = "refuse",
    ) -> None:
        if isinstance(wire, FSDPWire):
            raise ValueError(
                "WireState is not for FSDP2's own traffic: save that by wire.save(folder), or by "
                "wire.state_dict() in a file of each rank"
            )
        self._wire, self._key, self._missing = wire, key, missing
        self._reader = checkpoint
        if checkpoint is not None and not isinstance(checkpoint, StorageReader):
            self._reader = FileSystemReader(checkpoint)
        reducer = wire.attached.backward.reducer
        self._around, shard = reducer.env, reducer.shard
        self._shards = None if shard is None else _Shards(wire, shard)
        self._is_own = self._is_cut = False

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; for loading, empty tensors for the values that this rank reads. Then it is a
        collective.

        A rank that cannot read the checkpoint's metadata raises the reason, and the others raise
        `PeerFailed`.
        """
        if self._reader is None:
            own = self._wire.state_dict()
            return own if self._shards is None else self._shards.divided(single(own)[0])
        return self._on_all(self._places)

    def _places(self) -> dict[str, Any]:
        """Empty tensors for the values that this rank reads.

        A collective. If a rank cannot read the metadata, all ranks raise an error that names it.
        """
        control = self._around.control
        stored, fits = on_all_ranks(self._look, "read the metadata of its checkpoint", control)
        self._is_own = bool(gathered(control, torch.tensor([fits], device="cpu")).all())
        return on_all_ranks(lambda: self._rooms(stored), "make room for its state", control)

    def _look(self) -> tuple[_Stored, bool]:
        """Values of this object in the checkpoint; True if this rank can read its own part alone."""
        assert isinstance(self._reader, StorageReader), "made one above"
        metadata = self._reader.read_metadata()
        stored = {
            path: metadata.state_dict_metadata[name]
            for name, path in (metadata.planner_data or {}).items()
            if path[0] == self._key
        }
        if not stored:
            raise ValueError(f"the checkpoint has no {self._key!r}: it was saved without gradwire's state")
        saved = {path[1] for path in stored}
        if self._shards is None:
            mine, world = f"rank{self._around.control.rank}", self._around.control.world
            return stored, len(saved) == world and mine in saved
        tensors = {
            path[-1]: each.size
            for path, each in stored.items()
            if path[2] in _PLANES and isinstance(each, TensorStorageMetadata)
        }
        parts = {path[2] for path in stored if path[2].startswith("shard")}
        self._is_cut = all(each.startswith(_REPLICA) for each in saved) and self._shards.suit(tensors)
        return stored, self._is_cut and self._shards.fits(saved, len(parts))

    def _rooms(self, stored: _Stored) -> dict[str, Any]:
        own = f"rank{self._around.control.rank}" if self._shards is None else self._shards.replica
        state: dict[str, Any] = {}
        for (_key, *inner, last), kind in stored.items():
            if (inner and self._is_own and inner[0] != own) or not self._reads(inner):
                continue
            place = state
            for part in inner:
                place = place.setdefault(part, {})
            place[last] = self._place(inner, last, kind) if isinstance(kind, TensorStorageMetadata) else None
        return state

    def _on_all(self, function: Callable[[], T]) -> T:
        return self._wire.attached.backward.together("loading by DCP", function)

    def _reads(self, inner: Sequence[str]) -> bool:
        """True if this rank reads the values under `inner`: state of exchanges only for its own shard."""
        of_shard = len(inner) > 1 and inner[1].startswith("shard")
        return not of_shard or (self._is_own and self._shards is not None and inner[1] == self._shards.name)

    def _place(self, inner: Sequence[str], last: str, stored: TensorStorageMetadata) -> Tensor:
        if self._is_cut and inner[1] in _PLANES and self._shards is not None:
            return self._shards.room(last, stored.properties.dtype)
        return torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, with the errors of `Wire.load_state_dict`. A collective, as `dcp.load` is."""
        control = self._around.control
        whole = self._on_all(
            lambda: on_all_ranks(lambda: self._whole(state), "put its state together", control)
        )
        self._wire.load_state_dict(whole, missing=self._missing)

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Assemble a state that `Wire.load_state_dict` accepts, from `state` as DCP has read it.

        It is this rank's own, or the mean of all replicas. Without shards it is `state` itself.
        """
        for each in state.values():
            for group in ("memory", "planes", "kept"):  # DCP drops those that are empty
                each.setdefault(group, {})
        if any(key.startswith(_REPLICA) for key in state):
            if self._is_own and self._shards is not None:
                return self._shards.joined(state[self._shards.replica])
            return self._mean(list(state.values()))
        return state

    def _mean(self, replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Mean state of all replicas: of this rank's shards, if those were read, else of whole parameters."""
        specs = {spec.name: spec for spec in self._wire.attached.backward.reducer.specs}
        first, shards = replicas[0], self._shards if self._is_cut else None

        def shaped(name: str, found: Tensor) -> Tensor:
            if shards is not None:
                return shards.filled(specs[name], found)
            whole = specs[name].whole if name in specs else None
            # What has another shape now, the state is refused for, or drops.
            return found if whole is None or found.shape != (whole.numel,) else whole.shaped(found)

        def means(planes: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
            return mean_of([{name: shaped(name, each) for name, each in plane.items()} for plane in planes])

        whole = [spec.whole for spec in specs.values()]
        knows = first["whole"] == layout_hash(whole)
        mine = layout_hash(whole if shards is None else list(specs.values()))
        return {
            **{key: first[key] for key in _ALIKE if key in first},
            "rank": None,
            "world": None,
            "kept": {},
            "shard": None if shards is None else (shards.shard.number, shards.shard.parts),
            "shapes": first.get("shapes"),
            "layout": mine if knows else first["whole"],
            "memory": means([each["memory"] for each in replicas]),
            "planes": {
                plane: means([each["planes"][plane] for each in replicas]) for plane in first["planes"]
            },
        }


class _Shards:
    """The shards of this rank, each a `DTensor` over the ranks of its replica."""

    def __init__(self, wire: Wire, shard: Shard) -> None:
        reducer = wire.attached.backward.reducer
        assert shard.group is not None, "ranks are processes"
        self.shard = shard
        self.name = f"shard{shard.number}"
        self.replica = f"{_REPLICA}{min(dist.get_process_group_ranks(shard.group))}"
        self._world, self._rank = reducer.env.control.world, reducer.env.control.rank
        self._specs = {spec.name: spec for spec in reducer.specs}
        self._mesh = DeviceMesh.from_group(shard.group, "cpu")

    def fits(self, saved: set[str], parts: int) -> bool:
        """True if a checkpoint has a memory for every present replica, in as many shards."""
        return parts == self.shard.parts and len(saved) * parts == self._world and self.replica in saved

    def divided(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's `state` as DCP saves it, under the key of its replica.

        Memories become `DTensor`s over the ranks of the replica. State that this rank alone has is under
        `name`.
        """
        planes, beyond = dict[str, Any](), dict[str, Any]()
        for plane, memories in {"": state["memory"], **state["planes"]}.items():
            planes[plane] = {name: self._cut(self._specs[name], each) for name, each in memories.items()}
            rest = {name: each[self._length(self._specs[name]) :] for name, each in memories.items()}
            beyond[plane or "memory"] = {name: each.clone() for name, each in rest.items() if each.any()}
        alike = {key: state[key] for key in (*_ALIKE, "layout", "shapes")}
        alike["whole"] = layout_hash([spec.whole for spec in self._specs.values()])
        own = {"number": self.shard.number, "kept": state["kept"], "beyond": beyond, "noted": state["noted"]}
        return {self.replica: {**alike, "memory": planes.pop(""), "planes": planes, self.name: own}}

    def joined(self, replica: Mapping[str, Any]) -> dict[str, Any]:
        """Inverse of `divided`: this rank's state, from the state of its replica as DCP has read it."""
        own = replica[self.name]
        beyond = own.get("beyond", {})

        def filled(plane: str, memories: Mapping[str, Tensor]) -> dict[str, Tensor]:
            found = {name: self.filled(self._specs[name], each) for name, each in memories.items()}
            for name, rest in beyond.get(plane, {}).items():
                found[name][self._length(self._specs[name]) :] = rest
            return found

        return {
            **{key: replica[key] for key in (*_ALIKE, "layout") if key in replica},
            "rank": self._rank,
            "world": self._world,
            "kept": own.get("kept", {}),
            **{key: own[key] for key in ("noted",) if key in own},
            "shard": (self.shard.number, self.shard.parts),
            "shapes": replica.get("shapes"),
            "memory": filled("memory", replica["memory"]),
            "planes": {plane: filled(plane, memories) for plane, memories in replica["planes"].items()},
        }

    def suit(self, sizes: Mapping[str, Sequence[int]]) -> bool:
        """True if tensors of these sizes, by parameter, can be cut as the parameters are cut here."""
        known = {name: _shape(spec) for name, spec in self._specs.items()}
        return all(known.get(name) == tuple(size) for name, size in sizes.items())

    def room(self, name: str, dtype: torch.dtype) -> DTensor:
        """DTensor of zeros in which DCP can put this rank's shard of the parameter `name`."""
        spec = self._specs[name]
        return self._cut(spec, torch.zeros(spec.shape, dtype=dtype, device="cpu"))

    def filled(self, spec: ParameterSpec, tensor: Tensor) -> Tensor:
        """This rank's shard, padded with zeros to `spec.shape`, the size of the largest shard."""
        mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found = mine.new_zeros(spec.shape)
        found[: len(mine)] = mine
        return found

    def _length(self, spec: ParameterSpec) -> int:
        """Rows, or elements, that this rank has of a parameter."""
        left = _shape(spec)[0] - self.shard.number * spec.shape[0]
        return min(max(left, 0), spec.shape[0])

    def _cut(self, spec: ParameterSpec, filled: Tensor) -> DTensor:
        shape = _shape(spec)
        stride = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        mine = filled[: self._length(spec)]
        return DTensor.from_local(
            mine, self._mesh, (Cut(0),), run_check=False, shape=torch.Size(shape), stride=stride
        )


def _shape(spec: ParameterSpec) -> tuple[int, ...]:
    """Shape of the tensor that is cut along its first dimension: the parameter, or its elements in the order
    of memory.
    """
    return spec.whole.shape if len(spec.shape) > 1 else (spec.whole.numel,)
