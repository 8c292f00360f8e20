"""Source for FSDP2: ranks of a node hold shards of the parameters; shards are averaged between nodes.

`fully_shard` on a mesh of one dimension gathers parameters and reduce-scatters gradients inside the node.
Then it calls the hooks on each sharded parameter, whose gradient is in place. Our hooks hand it to the
reducer. So FSDP reduces inside the node, and gradwire between nodes, on shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from gradwire.sources.plain import PlainParameters
from gradwire.sources.unwrap import Optimizers
from gradwire.step.shards import shards_of
from gradwire.unit.context import Replicas, Replicated
from gradwire.unit.parameters import ParameterSpec, specs_of


def is_sharded(model: nn.Module) -> bool:
    """True if some parameters are sharded."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


class ShardedParameters(PlainParameters):
    """Source of the shards of a module on which `fully_shard` was called, in buckets as those of plain
    modules.

    All ranks have shards of equal size, padded with zeros if rows do not divide evenly: so units, rounds and
    fingerprints are equal on all ranks. All ranks of all replicas agree on a step.
    """

    kind = "shards of FSDP2"

    def __init__(self, model: nn.Module, replicas: dist.ProcessGroup) -> None:
        super().__init__(model, replicas)
        from gradwire.sources.fsdp.modules import modules_of, shards_in  # loads FSDP2

        self._strides = {}  # shards keep their order
        self._shards_in = shards_in
        self._mesh, modules = _mesh_of(self.parameters), modules_of(model)
        # The mesh of a parameter may be an equal one of groups that have ended: torch keeps meshes in caches.
        self.inside: dist.ProcessGroup = modules[0].received()[0] if modules else self._mesh.get_group()
        self._is_offloaded = any(each.is_offloaded for each in modules)
        parts = self.inside.size()
        self.specs = shards_of([replace(spec, stride=None) for spec in specs_of(model)], parts, by_rows=True)
        if parts > 1:
            self.rows = {spec.name: self.local(self.parameters[spec.name]).shape[0] for spec in self.specs}

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks, which agree on a step."""
        everyone = dist.group.WORLD
        assert everyone is not None, "asked for after the default group was made"
        return everyone

    @property
    def members(self) -> tuple[Sequence[int], Sequence[int]]:
        """The mesh's ranks, and those of `replicas=`."""
        inside = dist.get_process_group_ranks(self.inside)
        return inside, dist.get_process_group_ranks(self._replicas)

    @property
    def over(self) -> Sequence[int]:
        """The ranks of `replicas=`."""
        return self.members[1]

    def check(self) -> None:
        """Check as for plain modules; check that all are sharded by rows, without offload, over fitting
        ranks."""
        super().check()
        (inside, between), world = map(set, self.members), dist.get_world_size()
        if len(inside & between) != 1 or len(inside) * len(between) != world:
            raise ValueError(
                f"fully_shard's mesh has ranks {sorted(inside)}, and replicas= has {sorted(between)}: they "
                f"must have one rank in common, and make up all {world} ranks as a grid. Take both from one "
                "mesh: fully_shard(model, mesh=mesh['ranks']), replicas=mesh['nodes']"
            )
        carried = self._shards_in(self.model)
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad and not isinstance(parameter, DTensor):
                continue
            if not isinstance(parameter, DTensor):
                raise ValueError(
                    f"parameter {name!r} is not sharded, while others are: call fully_shard on the whole "
                    "model, too, and without ignored_params. Tensor parallelism is not carried yet"
                )
            if id(parameter) not in carried:
                raise ValueError(
                    f"parameter {name!r} is sharded, but not by fully_shard, whose hooks bring gradients. "
                    "Tensor parallelism is not carried yet"
                )
            if parameter.device_mesh != self._mesh or parameter.placements != (Shard(0),):
                raise ValueError(
                    f"parameter {name!r} is placed as {parameter.placements}: gradwire carries those that "
                    "one mesh of one dimension shards by rows. Tensor parallelism is not carried yet"
                )
        if self._is_offloaded:
            raise ValueError(
                "fully_shard was called with CPUOffloadPolicy, which moves gradients away before hooks can "
                "change them: leave it out"
            )

    def current(self) -> Mapping[str, Tensor]:
        """The shards, also where FSDP has gathered parameters in their place."""
        shards = self._shards_in(self.model)
        return {name: shards.get(id(each), each) for name, each in super().current().items()}

    def replicas_of(self, optimizers: Callable[[], Optimizers]) -> Replicas:
        """This rank's shards of the values that all replicas share."""
        return partial(self._replicated, super().replicas_of(optimizers))

    def _replicated(self, whole: Replicas, name: str) -> Replicated | None:
        seen = whole(name)
        if seen is None:
            return None
        spec = next(spec for spec in self.specs if spec.name == name)
        state = {
            key: self._filled(spec, value) if isinstance(value, DTensor) else value
            for key, value in seen.state.items()
        }
        return replace(seen, parameter=self._filled(spec, seen.parameter), state=state)

    def _filled(self, spec: ParameterSpec, tensor: Tensor) -> Tensor:
        """This rank's rows, padded with a row of zeros if other ranks have one more."""
        mine = self.local(tensor)
        if tuple(mine.shape) == spec.shape:
            return mine
        filled = mine.new_zeros(spec.shape)
        filled[: mine.shape[0]] = mine
        return filled

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a sharded tensor."""
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor

    def give(self, name: str, view: Tensor, *, is_there: bool) -> None:
        """Make the memory of `view` the gradient of the parameter `name`, sharded like it. Does nothing if it
        `is_there`, that is, the gradient already.
        """
        parameter = self.parameters[name]
        assert isinstance(parameter, DTensor), "checked"
        if not is_there:
            parameter.grad = self.sharded_as(parameter, view)

    @staticmethod
    @torch.no_grad()
    def sharded_as(parameter: DTensor, mine: Tensor) -> DTensor:
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(
            mine, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    def adding(self, spec: ParameterSpec, flat: Tensor) -> Callable[[], object]:
        """Prepare to add this rank's rows of `flat`, which is padded with zeros; returns the function
        that adds.
        """
        parameter = self.parameters[spec.name]
        assert isinstance(parameter, DTensor), "checked"
        unsent = spec.shaped(flat)[: self.rows.get(spec.name)].to(parameter.dtype)
        if parameter.grad is None:
            return partial(setattr, parameter, "grad", self.sharded_as(parameter, unsent))
        return partial(self.local(parameter.grad).add_, unsent)


def _mesh_of(parameters: Mapping[str, nn.Parameter]) -> Any:
    """The mesh of the first sharded parameter. Raises `ValueError` unless it has one dimension."""
    first = next(each for each in parameters.values() if isinstance(each, DTensor))
    mesh = first.device_mesh
    if mesh.ndim == 1:
        return mesh
    if any(isinstance(each, DTensor) and not _is_native(each) for each in parameters.values()):
        raise ValueError(
            f"the model is sharded on a mesh of {mesh.ndim} dimensions, {mesh}, by fully_shard and by tensor "
            "parallelism, which is not carried yet: call fully_shard alone, on the dimension inside a "
            "node, and pass the one between nodes as replicas="
        )
    raise ValueError(
        f"the model is sharded on a mesh of {mesh.ndim} dimensions, {mesh}: FSDP averages between nodes "
        "itself then, before gradwire could. Call fully_shard on the dimension inside a node alone, and "
        "pass the one between nodes as replicas="
    )


def _is_native(parameter: DTensor) -> bool:
    """True if a parameter is placed as HSDP does: replicated in the first dimension, sharded by rows in the
    second.
    """
    return parameter.placements == (Replicate(), Shard(0))
