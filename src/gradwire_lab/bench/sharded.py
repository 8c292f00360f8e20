"""Settings under FSDP2: which modules are sharded, what torch itself sends, and the weights of all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire._api.plan_fsdp import parsed
from gradwire.sources.fsdp.modules import modules_of, scattered_type
from gradwire_lab.bench.settings import BenchEntry

STOCK = "fsdp2"
"""The peer: FSDP2 as it is, or with the types of a `MixedPrecisionPolicy`."""
_TYPES = ("param_dtype", "reduce_dtype")


def check(entry: BenchEntry) -> None:
    """Raise `ValueError` for a peer or a recipe that there is not under FSDP2."""
    precision(entry) if entry.kind == "peer" else parsed(entry.name)


def precision(entry: BenchEntry) -> MixedPrecisionPolicy:
    """The types in which FSDP2 computes and sends: torch's own, but for a peer's options, and for exact
    gathers, which are of bfloat16.

    >>> from gradwire_lab.bench.settings import parse_entry
    >>> precision(parse_entry("fsdp2(param_dtype=bfloat16)", "peer")).param_dtype
    torch.bfloat16
    """
    if entry.kind != "peer":
        is_exact = parsed(entry.name)[1] == "exact"
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_exact else None)
    types = {key: getattr(torch, str(value), None) for key, value in entry.options.items()}
    fit = all(isinstance(each, torch.dtype) and each.is_floating_point for each in types.values())
    if entry.stem != STOCK or not fit or not types.keys() <= set(_TYPES):
        raise ValueError(
            f"peer {entry.name!r}: with --sharded the only peer is {STOCK}, or with types "
            f"{STOCK}(param_dtype=bfloat16, reduce_dtype=float32)"
        )
    return MixedPrecisionPolicy(param_dtype=types.get("param_dtype"), reduce_dtype=types.get("reduce_dtype"))


def blocks(model: nn.Module) -> list[nn.Module]:
    """Modules that are gathered one by one: what the outermost `Sequential` and `ModuleList` hold.

    A module that shares a parameter with modules outside it is gathered with the rest, as FSDP2 shards a
    parameter only once.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> len(blocks(nn.ModuleDict({"layers": layers, "head": nn.Linear(2, 2)})))
    2
    """
    owners: dict[Tensor, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    return [
        each
        for each in dict.fromkeys(_outermost(model))  # one module may stand in two places
        if all(owners[parameter] <= {*each.modules()} for parameter in each.parameters())
    ]


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for each in module.children():
        if not any(True for _ in each.parameters()):
            continue
        if isinstance(module, nn.Sequential | nn.ModuleList) and not isinstance(
            each, nn.ModuleList | nn.ModuleDict
        ):
            yield each
        else:
            yield from _outermost(each)


def shard(model: nn.Module, entry: BenchEntry) -> None:
    """Shard `model` over all ranks, alike in all settings. A collective."""
    mesh, policy = init_device_mesh("cpu", (dist.get_world_size(),)), precision(entry)
    for each in blocks(model):
        fully_shard(each, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def attach(
    entry: BenchEntry, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int
) -> gradwire.Wire | None:
    """Attach the recipe of `entry` to FSDP2's own traffic. Returns its wire; `None` for a peer. A
    collective.
    """
    if entry.kind == "peer":
        return None
    chosen, gather = parsed(entry.name)
    return gradwire.attach(model, optimizer, chosen.text, gather=gather, seed=seed)  # type: ignore[arg-type]


def sent_bytes(model: nn.Module, entry: BenchEntry) -> float:
    """Bytes that FSDP2 itself sends per rank and step over gloo.

    Modules are gathered twice, the root once, because it stays gathered. For a scatter gloo runs an
    all-reduce, which sends twice as much.
    """
    policy, total = precision(entry), 0
    for module in modules_of(model):
        gathers, trained = 2 if module.name else 1, module.trained()
        for place, parameter in enumerate(module.parameters.values()):
            gathered = policy.param_dtype or parameter.dtype
            summed = scattered_type(policy, parameter.dtype)
            scatters = 2 if place in trained else 0
            sizes = gathers * gathered.itemsize + scatters * summed.itemsize
            total += module.elements[place] * sizes
    return float((dist.get_world_size() - 1) * total)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within it, parameters are whole, with the numbers that this rank computes with. A collective."""
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for each in modules:
        each.unshard()
    try:
        yield
    finally:
        for each in modules:
            each.reshard()
