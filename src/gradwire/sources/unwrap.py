"""Unwrapping: the module and the plain optimizers inside the objects that frameworks return.

Wrappers are recognised by their attributes, so no framework is imported. Models that gradwire cannot carry
are refused with a sentence that says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

Optimizers = tuple[torch.optim.Optimizer, ...]
"""All optimizers of one model's parameters; empty if none was given."""

_INSIDE = ("_orig_mod", "_forward_module")
"""Attributes in which the wrappers of torch.compile and Fabric keep their module."""

_FSDP = "torch.distributed.fsdp.FSDPModule"
_REPLICATED = (
    "was made by replicate(), which averages gradients itself; wrap it in DistributedDataParallel(model) "
    "instead, or leave it plain and pass replicas="
)
_REFUSED = {
    "torch.distributed._composable.replicate_with_fsdp.ReplicateModule": _REPLICATED,
    _FSDP: (
        "is sharded by fully_shard: with fully_shard on the mesh inside a node, and replicas= the group or "
        "mesh dimension between nodes, gradwire averages its shards between nodes"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "is sharded by the older FSDP, which sends parameters, too. Use fully_shard on the mesh inside a "
        "node, and replicas= between nodes; or, if the model fits on one device, DistributedDataParallel"
    ),
    "torch.distributed._composable.replicate.DDP": _REPLICATED,
    "deepspeed.runtime.engine.DeepSpeedEngine": (
        "is DeepSpeed's, which reduces gradients itself; train with DistributedDataParallel and a plain "
        "optimizer to let gradwire carry them"
    ),
}
"""Complaint and advice, by the full name of a class from which a model may inherit."""


def ddp_of(model: object) -> DistributedDataParallel:
    """The `DistributedDataParallel` module inside the wrappers of torch.compile and Lightning Fabric.

    Raises `ValueError` if there is none. It asks no other ranks, because a script wraps alike on all of them.

    >>> ddp_of(nn.Linear(1, 1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: Linear is a plain module: wrap it in DistributedDataParallel first, or pass replicas=, the \
process group over which gradients are averaged, such as torch.distributed.group.WORLD
    """
    inner = inside(model)
    if isinstance(inner, DistributedDataParallel):
        return inner
    raise ValueError(_why_not(inner) or _neither(inner))


def replicated_in(model: object) -> nn.Module:
    """The module inside the wrappers of torch.compile and Lightning Fabric, for `attach` with `replicas=`. It
    may be under `fully_shard`.

    Raises `ValueError` for a `DistributedDataParallel` module and for a model whose gradients gradwire cannot
    carry.
    """
    inner = inside(model)
    if isinstance(inner, DistributedDataParallel):
        raise ValueError(
            "replicas= is for modules without a wrapper, and a DistributedDataParallel module has its own "
            "process group. Leave replicas= out, or attach the module inside"
        )
    why = _why_not(inner, but=_FSDP)
    if why is None and isinstance(inner, nn.Module):
        return inner
    raise ValueError(why or _neither(inner))


def is_plain(model: object) -> bool:
    """True for a module that is not sharded, and has no wrapper but those that are removed here."""
    inner = inside(model)
    return (
        isinstance(inner, nn.Module)
        and not isinstance(inner, DistributedDataParallel)
        and not _why_not(inner)
    )


def sharded_in(model: object) -> nn.Module | None:
    """The module inside such wrappers if `fully_shard` was called on it, or on parts of it; else `None`."""
    inner = inside(model)
    if not isinstance(inner, nn.Module) or isinstance(inner, DistributedDataParallel):
        return None
    kinds = {base for each in inner.modules() for base in type(each).__mro__}
    is_sharded = any(f"{kind.__module__}.{kind.__qualname__}" == _FSDP for kind in kinds)
    return inner if is_sharded and not _why_not(inner, but=_FSDP) else None


def inside(model: object) -> object:
    """The DDP module, or else the plain one, inside the wrappers of torch.compile and Lightning Fabric."""
    inner = model
    while isinstance(inner, nn.Module) and not isinstance(inner, DistributedDataParallel):
        name = next((name for name in _INSIDE if name in inner._modules), None)
        if name is None:
            break
        inner = inner._modules[name]
    return inner


def _neither(model: object) -> str:
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        return f"need a module, got {kind}; attach(model, optimizer) takes a DistributedDataParallel first"
    return (
        f"{kind} is a plain module: wrap it in DistributedDataParallel first, or pass replicas=, the process "
        "group over which gradients are averaged, such as torch.distributed.group.WORLD"
    )


def _why_not(model: object, but: str = "") -> str | None:
    """Why it cannot be carried in any way, or `None`; a class of the name `but` is no reason."""
    kind = type(model).__name__
    for base in type(model).__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name != but and (why := _REFUSED.get(name)) is not None:
            return f"the model, a {kind}, {why}"
    if isinstance(model, DataParallel):
        return (
            "the model is in DataParallel, which runs threads in one process and sends nothing; start one "
            "process per device with torchrun and wrap the model in DistributedDataParallel"
        )
    if isinstance(model, torch.optim.Optimizer):
        return "the model comes first, then the optimizer: attach(model, optimizer)"
    return None


def listed(given: object) -> object:
    """Several optimizers as a list, which can be read more than once; anything else as it is.

    An error of reading them is returned, for `optimizers_of`, where other ranks hear of it.

    >>> listed(each for each in "ab"), listed("ab")
    (['a', 'b'], 'ab')
    """
    if isinstance(given, Iterable) and not isinstance(given, str | nn.Module | torch.Tensor):
        try:
            return list(given)
        except Exception as error:
            return error
    return given


def optimizers_of(given: object) -> Optimizers:
    """Plain optimizers in the wrappers of Accelerate, Fabric and Lightning: one, several, or none.

    Raises `ValueError` for an object that is no optimizer, and the error of reading several.

    >>> optimizers_of("topk")
    Traceback (most recent call last):
    ...
    ValueError: the second argument is the optimizer, got a str; write attach(model, optimizer, 'topk')
    """
    if given is None:
        return ()
    several = listed(given)
    if isinstance(several, Exception):
        raise several
    if isinstance(several, list):
        if not several or any(isinstance(each, torch.Tensor | dict) for each in several):
            raise ValueError(
                f"the second argument is an optimizer or a list of them, got a {type(given).__name__} of "
                f"{type(several[0]).__name__ if several else 'nothing'}; pass the optimizer itself"
            )
        return tuple(_plain(each) for each in several)
    return (_plain(given),)


def scaler_of(given: object) -> torch.amp.GradScaler | None:
    """Gradient scaler that Accelerate keeps in its optimizers, of which several are `listed`; `None` if there
    is none.
    """
    several = given if isinstance(given, list) else [given]
    found = (getattr(each, "scaler", None) for each in several if _is_proxy(each))
    return next((scaler for scaler in found if isinstance(scaler, torch.amp.GradScaler)), None)


def _plain(given: Any) -> torch.optim.Optimizer:
    while _is_proxy(given):
        given = given.optimizer
    if isinstance(given, torch.optim.Optimizer):
        return given
    kind = type(given).__name__
    if isinstance(given, str) or kind in ("Recipe", "Composition"):
        shown = repr(given) if isinstance(given, str) else "recipe"
        raise ValueError(
            f"the second argument is the optimizer, got a {kind}; write attach(model, optimizer, {shown})"
        )
    if isinstance(given, torch.amp.GradScaler):
        raise ValueError(
            "the second argument is the optimizer, got a GradScaler; write "
            "attach(model, optimizer, scaler=scaler)"
        )
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        raise ValueError(
            f"the second argument is the optimizer, got {kind}; pass the optimizer that it schedules"
        )
    raise ValueError(f"the second argument is an optimizer or a list of them, got {kind}")


def _is_proxy(given: Any) -> bool:
    """True if an object only forwards to another optimizer: it has no hooks of its own to register on.

    That distinguishes these wrappers from optimizers that have another one inside and step themselves, such
    as Lookahead. Schedulers, which also refer to an optimizer, are no optimizers.
    """
    return (
        isinstance(given, torch.optim.Optimizer)
        and "_optimizer_step_post_hooks" not in vars(given)
        and isinstance(getattr(given, "optimizer", None), torch.optim.Optimizer)
    )
