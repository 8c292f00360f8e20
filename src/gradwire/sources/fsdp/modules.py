"""The modules of FSDP2, and the parameters that each of them gathers and scatters in one collective.

torch has no public way to ask for these. This is the only file that looks at FSDP2's own objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_OTHERS = {
    "SymmMemAllGather": "symmetric memory (set_symm_mem_for_comm)",
    "SymmMemReduceScatter": "symmetric memory (set_symm_mem_for_comm)",
    "ProcessGroupAllocAllGather": "set_allocate_memory_from_process_group_for_comm",
    "ProcessGroupAllocReduceScatter": "set_allocate_memory_from_process_group_for_comm",
}
"""Feature that installed a communication object, by the name of torch's class."""


@dataclass(frozen=True)
class ShardedModule:
    """One module of FSDP2, by its `name` in the model.

    `names` are its parameters, in the order in which a collective carries them.
    """

    name: str
    module: FSDPModule
    names: tuple[str, ...]
    group: Any
    """torch's `FSDPParamGroup`."""

    @property
    def label(self) -> str:
        """The name, for messages."""
        return self.name or "the root"

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The sharded parameters by name, also while FSDP has gathered ones in their place."""
        return {
            name: each.sharded_param for name, each in zip(self.names, self.group.fsdp_params, strict=True)
        }

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Elements of each parameter's shard, with the zeros that fill it up: the same on all ranks."""
        return tuple(each.padded_sharded_param_size.numel() for each in self.group.fsdp_params)

    def known(self) -> Iterator[nn.Parameter]:
        """All parameters that FSDP2 ever shows in the model: the sharded ones, and the gathered ones."""
        for each in self.group.fsdp_params:
            yield each.sharded_param
            if hasattr(each, "_unsharded_param"):
                yield each._unsharded_param

    def trained(self) -> tuple[int, ...]:
        """The places in `names` of the parameters that need a gradient now."""
        return tuple(
            place for place, each in enumerate(self.group.fsdp_params) if each.sharded_param.requires_grad
        )

    def received(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups over which a module's own shards are gathered and scattered."""
        mesh = self.group.mesh_info
        apart = getattr(mesh, "reduce_scatter_process_group", None)
        own: dist.ProcessGroup = mesh.shard_process_group
        return (own,) if apart is None else (own, apart)

    def whole(self, place: int, rows: Tensor) -> Tensor:
        """The parameter at `place`, without filling zeros, out of all ranks' `rows` (world, elements)."""
        of = self.group.fsdp_params[place]
        dim = of.fsdp_placement.dim
        size: torch.Size = of.sharded_param.shape
        pieces = [row.view(of.padded_sharded_param_size) for row in rows]
        return torch.cat(pieces, dim).narrow(dim, 0, size[dim])

    def rows(self, place: int, whole: Tensor, world: int) -> Tensor:
        """Inverse of `whole`: divide the parameter number `place` into rows (world, elements), one for each
        rank, filled up with zeros.
        """
        of = self.group.fsdp_params[place]
        rows = whole.new_zeros(world, self.elements[place])
        for row, piece in zip(rows, whole.chunk(len(rows), of.fsdp_placement.dim), strict=False):
            room = row.view(of.padded_sharded_param_size)
            room[tuple(slice(length) for length in piece.shape)] = piece
        return rows

    def add_to_gradient(self, place: int, mine: Tensor) -> None:
        """Add this rank's part of an unsharded gradient (elements,) to `p.grad`, or make it `p.grad` if there
        is none.
        """
        of = self.group.fsdp_params[place]
        shard = mine.view(of.padded_sharded_param_size)[tuple(slice(n) for n in of.sharded_size)]
        shard = shard.to(of.sharded_param.device, of.sharded_param.dtype).contiguous()
        if of.sharded_param.grad is None:
            of.sharded_param.grad = of.to_sharded_dtensor(shard)
        else:
            of.sharded_param.grad.to_local().add_(shard)

    def reshard(self) -> None:
        """Free gathered parameters, and drop a gather in flight, so that the next gather is a new one."""
        if self.group._all_gather_result is not None:
            self.module.unshard()  # waits for it, and begins none
        self.module.reshard()

    @property
    def divide_factor(self) -> float:
        """The number by which FSDP2 divides the sum of gradients."""
        factor = self.group.gradient_divide_factor
        return float(self.received()[0].size() if factor is None else factor)

    @property
    def forces_sums(self) -> bool:
        """True if `set_force_sum_reduction_for_comms` is on."""
        return bool(self.group.force_sum_reduction_for_comms)

    @property
    def collectives(self) -> tuple[Any, Any]:
        """The objects that gather and scatter now."""
        return self.group._all_gather_comm, self.group._reduce_scatter_comm

    def refuse_unfit(self, *, coded: bool) -> None:
        """Raise `ValueError` for a module whose collectives cannot be taken over, or not be `coded`."""
        for each in self.collectives:
            kind = type(each).__name__
            if kind in _OTHERS:
                raise ValueError(
                    f"module {self.label!r} uses {_OTHERS[kind]}, which takes the place that gradwire "
                    "needs: leave it out"
                )
            if not kind.startswith("Default"):
                raise ValueError(
                    f"the collectives of module {self.label!r} are carried already, by {kind}: detach that "
                    "first"
                )
        if not coded:
            return
        types = {each.param_dtype or each.orig_dtype for each in self._asked()}
        extended = [
            name
            for name, each in zip(self.names, self.group.fsdp_params, strict=True)
            if hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather")
        ]
        if extended or len(types) > 1:
            why = f"{extended[0]!r} is a tensor subclass" if extended else f"it has {_text(types)}"
            raise ValueError(
                f"module {self.label!r} is gathered as raw bytes, because {why}; raw bytes cannot be coded: "
                "leave gather= out, or give such parameters a fully_shard of their own"
            )

    def _asked(self) -> Iterator[Any]:
        """The parameters, with their types in forward, which FSDP2 itself determines only in the first
        forward pass.
        """
        for each in self.group.fsdp_params:
            each.init_dtype_attrs(self.group.mp_policy)
            yield each


def _text(types: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(each) for each in types))


def modules_of(model: nn.Module) -> tuple[ShardedModule, ...]:
    """The modules of FSDP2 inside `model` that hold parameters, in the order of `named_modules`.

    Raises `ValueError` for a module that holds several groups of parameters.
    """
    found, seen = [], set[int]()
    prefixes: dict[int, str] = {}
    for name, module in model.named_modules():
        prefixes.setdefault(id(module), f"{name}." if name else "")
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if id(state) in seen:
            continue
        seen.add(id(state))
        # Older versions of torch have one group for a module.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        groups = [each for each in groups if each is not None]
        if len(groups) > 1:
            raise ValueError(
                f"module {name or 'the root'!r} holds {len(groups)} groups of parameters, each on a mesh of "
                "its own: torch lets nothing else gather them. Call fully_shard on their modules instead"
            )
        for group in groups:
            names = tuple(
                prefixes[id(each._module_info.module)] + each._module_info.param_name
                for each in group.fsdp_params
            )
            found.append(ShardedModule(name, module, names, group))
    return tuple(found)


def check_parameters(model: nn.Module, modules: tuple[ShardedModule, ...]) -> dist.ProcessGroup:
    """The process group of the mesh that shards all trained parameters of `model`.

    Raises `ValueError` unless `fully_shard` shards all of them, over one mesh of one dimension.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError("fully_shard was called on parts of the model only: call it on the whole model, too")
    parameters = {name: each for module in modules for name, each in module.parameters.items()}
    carried = {id(each) for module in modules for each in module.known()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in carried and (isinstance(parameter, DTensor) or parameter.requires_grad):
            raise ValueError(
                f"parameter {name!r} is not sharded by fully_shard, while others are: leave ignored_params "
                "out. Tensor parallelism is not carried yet"
            )
    if not any(each.requires_grad for each in parameters.values()):
        raise ValueError("no parameter of the model needs a gradient: leave at least one unfrozen")
    meshes: dict[DeviceMesh, str] = {}
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor), "FSDP2 shards by no other means"
        meshes.setdefault(parameter.device_mesh, name)
        if parameter.is_complex():
            raise ValueError(f"parameter {name!r} is complex; keep it as two real ones")
    if len(meshes) > 1:
        (one, first), (other, second), *_ = meshes.items()
        raise ValueError(f"{first!r} is sharded over {one}, and {second!r} over {other}: use one mesh")
    [mesh] = meshes
    if mesh.ndim > 1:
        raise ValueError(
            f"the model is sharded on a mesh of {mesh.ndim} dimensions, {mesh}: FSDP2 averages between nodes "
            "itself, or tensor parallelism shards, too. Call fully_shard on one dimension alone, and pass "
            "the one between nodes as replicas="
        )
    return modules[0].received()[0]
