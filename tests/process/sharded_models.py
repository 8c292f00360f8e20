"""A model under `fully_shard`, on two nodes, for scenes and faults."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import gradwire
from tests.support.models import SHAPE
from tests.support.where import WHERE


class Blocks(nn.Module):
    """Three linear layers, sharded one by one, whose rows do not come out even; one that no rank uses."""

    calls: Tensor

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(SHAPE[0], 65), nn.Linear(65, 65), nn.Linear(65, SHAPE[-1])])
        self.never = nn.Linear(33, 65)
        self.scale = nn.Parameter(torch.ones(1))  # one row: only the first rank has it
        self.norm = nn.LayerNorm(65)
        self.register_buffer("calls", torch.zeros(3))
        self._reentrant = reentrant
        self.branches = False
        """Whether the first node uses what no rank uses otherwise."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.requires_grad_()
        for block in self.blocks[:-1]:
            if self._reentrant is None:
                hidden = torch.tanh(block(hidden))
            else:
                hidden = torch.tanh(checkpoint(block, hidden, use_reentrant=self._reentrant))
        if self.branches and dist.get_rank() < mesh()["shard"].size():
            hidden = hidden + self.never(hidden[:, :33])
        out: Tensor = self.blocks[-1](self.norm(hidden)) * self.scale
        with torch.no_grad():
            self.calls += 1 + dist.get_rank()
        return out


_MESHES: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()
"""By default process group."""


def mesh() -> DeviceMesh:
    """One for all scenes that share a default group."""
    everybody = dist.group.WORLD
    assert everybody is not None
    if everybody not in _MESHES:
        sizes = 2, dist.get_world_size() // 2
        _MESHES[everybody] = init_device_mesh(WHERE.type, sizes, mesh_dim_names=("replicate", "shard"))
    return _MESHES[everybody]


def sharded(
    over: DeviceMesh | None = None,
    seed: int = 0,
    reentrant: bool | None = None,
    frozen: Collection[int] = (),
    **how: Any,
) -> nn.Module:
    """With some blocks `frozen`."""
    torch.manual_seed(seed)
    model = Blocks(reentrant)
    for number, block in enumerate(model.blocks):
        block.requires_grad_(number not in frozen)
    over = mesh()["shard"] if over is None else over
    for block in model.blocks:
        fully_shard(block, mesh=over, **how)
    return fully_shard(model, mesh=over, **how)


def attached(model: nn.Module, recipe: str, **options: Any) -> tuple[torch.optim.Optimizer, gradwire.Wire]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return optimizer, gradwire.attach(model, optimizer, recipe, replicas=mesh()["replicate"], **options)
