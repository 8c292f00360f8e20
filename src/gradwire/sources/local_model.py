"""The model of a replica that takes local steps: what it trains, and the ranks that hold it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.sources.plain import group_in
from gradwire.sources.same_parameters import Known
from gradwire.sources.sharded import ShardedParameters, is_sharded
from gradwire.sources.unwrap import inside, replicated_in
from gradwire.step.shards import shards_of
from gradwire.unit.parameters import ParameterSpec, specs_of

WEIGHT = "gradwire: weight"
"""In a round, beside parameters: does this replica count (1 or 0), has it finished (1 or 0)."""


@dataclass(frozen=True)
class Grid:
    """Who averages with whom. Ranks have their numbers in the world, or in a meeting of members."""

    group: dist.ProcessGroup
    """All ranks that take part."""
    inside: Sequence[int]
    """The ranks of this replica; those that hold shards, in the order of these."""
    between: Sequence[int]
    """The ranks with this rank's place in all replicas, over which the mean is taken."""
    has_shards: bool

    @property
    def members(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """As of `Source`."""
        return (self.inside, self.between) if self.has_shards else None

    @property
    def machine(self) -> Sequence[int] | None:
        """The ranks that hold this replica alike; `None` if it is this one alone, or has a shard."""
        return None if self.has_shards or len(self.inside) == 1 else self.inside


class LocalModel:
    """The model of one replica, which it holds weakly, with the tensors of this rank.

    `own` are the trained parameters by name, and `floating` the names of buffers that are averaged.
    """

    def __init__(self, model: nn.Module, replicas: object) -> None:
        """`replicas` is a process group or the dimension of a mesh. Raises `ValueError` for other models than
        a plain module, or one in DDP or under `fully_shard`.
        """
        self._model = weakref.ref(model)
        wrapped = inside(model)
        shared_by: dist.ProcessGroup | None = None
        self._left_out: frozenset[str] = frozenset()
        """Names of parameters that DDP was told to ignore."""
        if isinstance(wrapped, DistributedDataParallel):
            inner: nn.Module = wrapped.module
            shared_by, self._left_out = wrapped.process_group, frozenset(wrapped.parameters_to_ignore)
        else:
            inner = replicated_in(model)
        self.replicas = group_in(replicas)
        self.shards = ShardedParameters(inner, self.replicas) if is_sharded(inner) else None
        if self.shards is not None:
            shared_by = self.shards.inside
        self.inside = None if shared_by is None or shared_by.size() == 1 else shared_by
        """Ranks that share this replica, or hold it alike; `None` for a single one."""
        trained = specs_of(inner, self._left_out) if self.shards is None else self.shards.specs
        if not trained:
            raise ValueError("no parameter of the model needs a gradient: leave at least one unfrozen")
        named = dict(inner.named_parameters())
        self.own = {spec.name: named[spec.name] for spec in trained}
        self.floating = [name for name, each in inner.named_buffers() if each.is_floating_point()]
        self.device = self.here(next(iter(self.own.values()))).device
        weight = ParameterSpec(WEIGHT, (2,), torch.float32, 2)
        if self.shards is not None:
            weight = _own_part(weight, self.shards.inside.size())
        self.specs = (*map(_wide, trained), weight)
        """Of what a round carries, in the type in which it is summed."""
        self.rows: Mapping[str, int] = {} if self.shards is None else self.shards.rows
        """Of sharded parameters, how many rows are here."""
        self.grid = self._grid(shared_by)

    def _grid(self, shared_by: dist.ProcessGroup | None) -> Grid:
        between = dist.get_process_group_ranks(self.replicas)
        if self.inside is None and self.shards is None:
            return Grid(self.replicas, [between[self.replicas.rank()]], between, has_shards=False)
        everyone = dist.group.WORLD
        assert everyone is not None, "some ranks share a replica"
        assert shared_by is not None, "by this group"
        return Grid(
            everyone, dist.get_process_group_ranks(shared_by), between, has_shards=self.shards is not None
        )

    @property
    def module(self) -> nn.Module:
        """The module inside the wrappers. Only for the thread that trains, which keeps it alive."""
        wrapped = inside(self._model())
        found = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        assert isinstance(found, nn.Module), "asked by the user of the model"
        return found

    def check(self) -> None:
        """Raise `ValueError` unless parameters can be summed, and ranks make up a grid."""
        if self.shards is not None:
            self.shards.check()
        for name, each in self.own.items():
            if each.is_complex():
                raise ValueError(f"parameter {name!r} is complex; keep it as two real ones")
        if self.grid.machine is not None:
            mine, between, world = set(self.grid.inside), set(self.grid.between), dist.get_world_size()
            if len(mine & between) != 1 or len(mine) * len(between) != world:
                raise ValueError(
                    f"DDP's process group has ranks {sorted(mine)}, and replicas= has {sorted(between)}: "
                    f"they must have one rank in common, and make up all {world} ranks as a grid. Take both "
                    "from one mesh: process_group=mesh.get_group('ranks'), replicas=mesh['nodes']"
                )

    # -- this rank's tensors

    def here(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that this rank has, detached."""
        return tensor.detach() if self.shards is None else self.shards.local(tensor).detach()

    def buffers(self) -> dict[str, Tensor]:
        """The floating buffers, as they are now: modules put new tensors in their place."""
        buffers = dict(self.module.named_buffers())
        return {name: buffers[name] for name in self.floating if name in buffers}

    def know(self) -> None:
        """Note which parameters the module has, for `require_known`."""
        self._known = Known(dict(self.module.named_parameters()), list(self.own), self._left_out)

    def require_known(self) -> None:
        """Raise `ValueError` if parameters were added, replaced or cast since `know`."""
        shards = self.shards
        self._known.require(dict(self.module.named_parameters()) if shards is None else shards.current())

    def reshard(self) -> None:
        """Drop gathered parameters that FSDP may hold: they are out of date once shards were written."""
        for each in self.module.modules() if self.shards is not None else ():
            if (reshard := getattr(each, "reshard", None)) is not None:
                reshard()

    # -- the ranks of this replica

    @property
    def place(self) -> int:
        """The number of this rank's shard; 0 without shards."""
        return 0 if self.shards is None else self.shards.inside.rank()

    def is_sound_everywhere(self, *, sound: bool) -> bool:
        """Whether all ranks that hold this replica say so. A collective of theirs."""
        if self.inside is None:
            return sound
        flag = torch.tensor(float(sound), dtype=torch.float32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.inside)
        return bool(flag)


def _wide(spec: ParameterSpec) -> ParameterSpec:
    """`spec` in the type in which it is summed."""
    whole = None if spec.shard_of is None else _wide(spec.shard_of)
    return replace(spec, dtype=spec.plane_dtype, shard_of=whole)


def _own_part(spec: ParameterSpec, parts: int) -> ParameterSpec:
    """The spec of a rank's own values, as if they were its part of something as many times as long."""
    shape = (parts * (spec.shape[0] if spec.shape else 1), *spec.shape[1:])
    (part,) = shards_of([replace(spec, shape=shape, numel=parts * spec.numel)], parts, by_rows=True)
    return part
