"""The modules of FSDP2, and the parameters that each of them gathers and scatters in one collective.

torch has no public way to ask for these. This is the only file that looks at FSDP2's own objects: all private
names are here, and `modules_of` says in words if torch has others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

__all__ = [
    "AllGather",
    "ReduceScatter",
    "ShardedModule",
    "all_gather",
    "begin_anew",
    "check_parameters",
    "modules_of",
    "reduce_scatter",
    "scattered_type",
    "shards_in",
]

# torch 2.13 renamed them; 2.11 has only the old ones.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

_KNOWN = "2.11 to 2.15"
"""The versions of torch whose private names and order of packing these are."""

_OF_GROUPS = (
    "device",
    "force_sum_reduction_for_comms",
    "fsdp_params",
    "gradient_divide_factor",
    "mesh_info",
    "_all_gather_comm",
    "_all_gather_result",
    "_reduce_scatter_comm",
    "_to_sharded",
)
_OF_PARAMETERS = (
    "fsdp_placement",
    "init_dtype_attrs",
    "mp_policy",
    "offload_to_cpu",
    "padded_sharded_param_size",
    "sharded_param",
    "sharded_size",
    "to_sharded_dtensor",
    "_module_info",
    "_sharded_local_tensor",
)
_OF_STATES = ("_comm_ctx", "_device_handle", "_modules_to_run_forward", "_state_ctx", "_training_state")
_OF_GROUPS_BROKEN_OFF = (
    "_partial_reduce_output",
    "_post_forward_indices",
    "_reshard_after_forward_event",
    "_training_state",
    "_wait_for_post_backward",
)
_OF_CONTEXTS = ("all_states", "iter_forward_root", "post_backward_final_callback_queued")
"""Names on which `begin_anew` relies where torch has no `reset_iter_state`."""
_LATER = ("orig_dtype", "param_dtype", "_unsharded_param")
"""The names in torch's `FSDPParamGroup` and `FSDPParam` on which this file relies. `FSDPParam` announces the
last ones, and has them from the first forward pass on."""

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

    `names` are its parameters, in the order in which a gather carries them.
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

    @property
    def device(self) -> torch.device:
        """The device of gathered parameters."""
        where: torch.device = self.group.device
        return where

    @property
    def is_offloaded(self) -> bool:
        """True if the module has a `CPUOffloadPolicy`."""
        return any(each.offload_to_cpu for each in self.group.fsdp_params)

    def trained(self) -> tuple[int, ...]:
        """The places in `names` of the parameters that need a gradient now, in the order in which a scatter
        carries them: since torch 2.15 by the type of gradients, before in that of `names`.
        """
        parameters = self.group.fsdp_params
        order = getattr(self.group, "_reduce_scatter_param_indices", range(len(parameters)))
        return tuple(place for place in order if parameters[place].sharded_param.requires_grad)

    def refuse_other_order(self, out: Tensor) -> None:
        """Raise `ValueError` if FSDP2 has unpacked the result `out` (elements,) of a scatter of all trained
        parameters in another order than `trained`.

        It tells from where gradients lie. It cannot tell where they are copies.
        """
        start, storage = out.data_ptr(), out.untyped_storage().data_ptr()
        for place in self.trained():
            grad = self.group.fsdp_params[place].sharded_param.grad
            mine = None if grad is None else grad.to_local()
            is_view = mine is not None and mine.numel() and mine.untyped_storage().data_ptr() == storage
            if mine is not None and is_view and mine.data_ptr() != start:
                raise ValueError(
                    f"FSDP2 of torch {torch.__version__} packs the gradients of module {self.label!r} in "
                    f"another order than gradwire knows, so that {self.names[place]!r} is elsewhere. Install "
                    f"torch {_KNOWN}, or a newer gradwire"
                )
            start += self.elements[place] * out.itemsize

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

    def forget_gather(self) -> None:
        """Let FSDP2 begin a new gather, after one that has failed: it would wait for that one again, or
        compute with what it has brought.
        """
        self.group._all_gather_result = None
        self.group._to_sharded()

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

    @property
    def gathered_types(self) -> set[torch.dtype]:
        """The types in which parameters are gathered: one, unless they are gathered as raw bytes."""
        return {each.param_dtype or each.orig_dtype for each in self.group.fsdp_params}

    def refuse_taken(self) -> None:
        """Raise `ValueError` for a module whose collectives cannot be taken over."""
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

    def refuse_raw_bytes(self) -> None:
        """Raise `ValueError` for a module that is gathered as raw bytes, which cannot be coded."""
        types = self.gathered_types
        state: Any = self.module._get_fsdp_state()
        policies = [getattr(state, "_mp_policy", None), *(each.mp_policy for each in self.group.fsdp_params)]
        if any(getattr(each, "param_dtype_override_fn", None) is not None for each in policies):
            # Since torch 2.15, where each parameter has its own policy beside that of its module.
            raise ValueError(
                f"the policy of module {self.label!r} has param_dtype_override_fn, by which parameters may "
                "be gathered in several types, as raw bytes; raw bytes cannot be coded: leave gather= out "
                "or param_dtype_override_fn, and call fully_shard on parameters of another type by themselves"
            )
        extended = [
            name
            for name, each in zip(self.names, self.group.fsdp_params, strict=True)
            if hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather")
        ]
        if extended or len(types) > 1:
            kinds = " and ".join(sorted(map(str, types)))
            why = f"{extended[0]!r} is a tensor subclass" if extended else f"it has {kinds}"
            raise ValueError(
                f"module {self.label!r} is gathered as raw bytes, because {why}; raw bytes cannot be coded: "
                "leave gather= out, or give such parameters a fully_shard of their own"
            )


def modules_of(model: nn.Module) -> tuple[ShardedModule, ...]:
    """The modules of FSDP2 inside `model` that hold parameters, in the order of `named_modules`.

    Raises `ValueError` for a module that holds several groups of parameters, and for a torch with other
    private names than those of this file.
    """
    found = []
    prefixes: dict[int, str] = {}
    for name, module in model.named_modules():
        prefixes.setdefault(id(module), f"{name}." if name else "")
    for name, module, groups in _grouped(model):
        if not hasattr(module, "reset_iter_state"):
            state: Any = module._get_fsdp_state()
            _require(state, *_OF_STATES)
            _require(state._state_ctx, *_OF_CONTEXTS)
        if len(groups) > 1:
            raise ValueError(
                f"module {name or 'the root'!r} holds {len(groups)} groups of parameters, each on a mesh of "
                "its own: torch lets nothing else gather them. Call fully_shard on their modules instead"
            )
        for group in groups:
            _require_names(group)
            if not hasattr(module, "reset_iter_state"):
                _require(group, *_OF_GROUPS_BROKEN_OFF)
            _determine_types(group)
            names = tuple(
                prefixes[id(each._module_info.module)] + each._module_info.param_name
                for each in group.fsdp_params
            )
            found.append(ShardedModule(name, module, names, group))
    return tuple(found)


def shards_in(model: nn.Module) -> dict[int, nn.Parameter]:
    """The sharded parameters of `model`, by the `id` of all that FSDP2 ever shows there: themselves, and the
    gathered ones.
    """
    found = {}
    for _name, _module, groups in _grouped(model):
        for each in (each for group in groups for each in group.fsdp_params):
            found[id(each.sharded_param)] = each.sharded_param
            if hasattr(each, "_unsharded_param"):
                found[id(each._unsharded_param)] = each.sharded_param
    return found


def begin_anew(model: nn.Module) -> None:
    """Drop what a pass has left that broke off: gathers, places in the pass, and all gradients.

    Otherwise FSDP2 would take itself to be in that pass still: it would never again end a backward pass, and
    would add gradients that it had not scattered to those of the next pass.
    """
    root: Any = model
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset(root._get_fsdp_state())
    # torch 2.15 drops gradients itself, earlier versions do not.
    for _name, _module, groups in _grouped(model):
        for each in (each for group in groups for each in group.fsdp_params):
            each.sharded_param.grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
            if "unsharded_accumulated_grad" in vars(each):  # before torch 2.15
                each.unsharded_accumulated_grad = None


def _reset(state: Any) -> None:
    """Do what `reset_iter_state` does, for a torch that has none. `state` is the root's."""
    of_pass, comm = state._state_ctx, state._comm_ctx
    if (scatter := getattr(comm, "reduce_scatter_state", None)) is not None:
        state._device_handle.current_stream().wait_event(scatter.event)
    comm.all_gather_state = comm.reduce_scatter_state = None
    comm.post_forward_order.clear()
    for each in of_pass.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
        for group in _groups_of(each):
            group._all_gather_result = None
            group._wait_for_post_backward()
            group._partial_reduce_output = group._reshard_after_forward_event = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    of_pass.iter_forward_root = None
    of_pass.post_backward_final_callback_queued = False


def scattered_type(policy: MixedPrecisionPolicy, own: torch.dtype) -> torch.dtype:
    """The type in which FSDP2 scatters gradients of parameters whose type is `own`."""
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    return own if torch.__version__ >= "2.15" else policy.param_dtype or own


def _grouped(model: nn.Module) -> Iterator[tuple[str, FSDPModule, list[Any]]]:
    """The modules under `fully_shard`, with their `FSDPParamGroup`s. Modules that share a state come once."""
    seen = set[int]()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if id(state) in seen:
            continue
        seen.add(id(state))
        yield name, module, _groups_of(state)


def _groups_of(state: Any) -> list[Any]:
    # Before torch 2.12 there is one group for a module.
    several = "_fsdp_param_groups" if hasattr(state, "_fsdp_param_groups") else "_fsdp_param_group"
    _require(state, several)
    groups = getattr(state, several)
    return [each for each in (groups if isinstance(groups, list) else [groups]) if each]


def _require_names(group: Any) -> None:
    _require(group, *_OF_GROUPS)
    _require(group.mesh_info, "shard_process_group")
    for each in group.fsdp_params:
        _require(each, *_OF_PARAMETERS, *_LATER)


def _require(known: object, *names: str) -> None:
    """Raise `ValueError` unless an object of torch's has these `names`, or its class announces them."""
    announced = getattr(type(known), "__annotations__", {})
    missing = [
        name for name in names if not hasattr(known, name) and not (name in _LATER and name in announced)
    ]
    if missing:
        raise ValueError(
            f"FSDP2 of torch {torch.__version__} is another than gradwire knows: its {type(known).__name__} "
            f"has no {' and no '.join(missing)}. Install torch {_KNOWN}, or a newer gradwire"
        )


def _determine_types(group: Any) -> None:
    """Let FSDP2 determine the types of `group`, and the order of its scatters, which it does itself in the
    first forward pass, and again there.
    """
    for each in group.fsdp_params:
        each.init_dtype_attrs(each.mp_policy)
    if hasattr(group, "_reduce_scatter_param_indices"):  # since torch 2.15
        _require(group, "_init_reduce_scatter_param_order")
        group._init_reduce_scatter_param_order()


def check_parameters(model: nn.Module, modules: tuple[ShardedModule, ...]) -> dist.ProcessGroup:
    """The process group of the mesh that shards all trained parameters of `model`.

    Raises `ValueError` unless `fully_shard` shards all of them, over one mesh of one dimension.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError("fully_shard was called on parts of the model only: call it on the whole model, too")
    parameters = {name: each for module in modules for name, each in module.parameters.items()}
    carried = shards_in(model)
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
