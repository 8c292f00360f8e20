"""Every Python block of the documents and docstrings, run on real ranks as its reader would run it."""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.pages import Block, blocks
from tests.support.ranks import FOLDER

Given = Callable[["Names"], Any]


class Names(dict[str, Any]):
    """What a block has said, and what its page takes for granted, made when the block asks for it."""

    def __init__(self, given: Mapping[str, Given]) -> None:
        super().__init__()
        self.given = given

    def __missing__(self, name: str) -> Any:
        if name not in self.given:
            raise KeyError(name)
        self[name] = found = self.given[name](self)
        return found


class Blocks(nn.Module):
    """A model in blocks, large enough that the default policy compresses them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(64, 4)

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch)


def _optimizer(names: Names) -> torch.optim.Optimizer:
    return torch.optim.SGD(names["model"].parameters(), lr=0.1)


def _loss(found: Tensor) -> Tensor:
    return (found**2).mean()


def _step(names: Names) -> Callable[[Tensor], None]:
    def step(batch: Tensor) -> None:
        names["optimizer"].zero_grad()
        _loss(names["model"](batch)).backward()
        names["optimizer"].step()

    return step


def _stepped(names: Names) -> gradwire.Wire:
    wire = gradwire.attach(names["model"], names["optimizer"], "topk(ratio=0.1)")
    for batch in names["batches"]:
        _step(names)(batch)
    return wire


def _rounds(names: Names) -> gradwire.OuterWire:
    return gradwire.outer(names["model"], names["optimizer"], every=2, replicas=dist.group.WORLD)


def _fully_sharded(names: Names) -> nn.Module:
    model, mesh = Blocks(), names["mesh"]
    for each in (*model.blocks, model):
        fully_shard(each, mesh=mesh["ranks"])
    return model


def _evaluating(names: Names) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(names["batches"][0])


def _recording(*_: Any, **__: Any) -> None:
    """Takes what a dashboard's function takes."""


ALWAYS: dict[str, Given] = {
    "gradwire": lambda _: gradwire,
    "torch": lambda _: torch,
    "dist": lambda _: dist,
    "nn": lambda _: nn,
    "logging": lambda _: logging,
    "warnings": lambda _: warnings,
    "DistributedDataParallel": lambda _: DistributedDataParallel,
    "rank": lambda _: dist.get_rank(),
    "batches": lambda _: [torch.ones(4, 64) * (dist.get_rank() + step) for step in range(4)],
    "gradient": lambda names: names["batches"][0],
    "loader": lambda names: names["batches"],
    "loss": lambda _: _loss,
    "loss_of": lambda names: lambda batch: _loss(names["model"](batch)),
    "model": lambda _: DistributedDataParallel(Blocks()),
    "optimizer": _optimizer,
    "step": _step,
    "wire": _stepped,
    "ddp": lambda names: names["model"],
}
DASHBOARDS: dict[str, Given] = {
    "wandb": lambda _: SimpleNamespace(log=_recording),
    "mlflow": lambda _: SimpleNamespace(log_metrics=_recording),
    "train_one_step": lambda names: lambda: _step(names)(names["batches"][0]),
}
GIVEN: dict[str, dict[str, Given]] = {
    "": {},
    "plain": {"model": lambda _: Blocks()},
    "sharded": {"model": lambda _: Blocks(), "nodes": lambda _: 2, "ranks_per_node": lambda _: 1},
    "dashboards": DASHBOARDS,
    "docstrings": DASHBOARDS
    | {
        "module": lambda _: Blocks(),
        "batch": lambda names: names["batches"][0],
        "first_half": lambda names: names["batches"][0][:2],
        "second_half": lambda names: names["batches"][0][2:],
        "images": lambda names: names["batches"][0],
        "train_step": _step,
        "step": lambda _: 1000,
        "folder": lambda _: "checkpoint",
        "file": lambda _: io.StringIO(),
        "json": lambda _: json,
        "SummaryWriter": lambda _: lambda: _recording,
        "evaluate": _evaluating,
    },
    "local steps": DASHBOARDS
    | {
        "model": lambda _: Blocks(),
        "module": lambda _: Blocks(),
        "batch": lambda names: names["batches"][0],
        "wire": _rounds,
        "train_one_step": lambda names: _step(names),
        "evaluate": _evaluating,
        "SummaryWriter": lambda _: lambda: _recording,
    },
    "fsdp2": {"model": lambda _: Blocks()},
    "fsdp2 attached": {
        "mesh": lambda _: init_device_mesh("cpu", (1, 2), mesh_dim_names=("nodes", "ranks")),
        "model": _fully_sharded,
        "wire": lambda names: gradwire.attach(names["model"], names["optimizer"], "int4", gather="int8"),
        "evaluate": _evaluating,
    },
    "fsdp2 replicas": {
        "mesh": lambda _: init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "ranks")),
        "model": _fully_sharded,
    },
    "two optimizers": {
        "optimizer_of_body": lambda names: torch.optim.SGD(names["model"].module.blocks.parameters(), lr=0.1),
        "optimizer_of_head": lambda names: torch.optim.SGD(names["model"].module.head.parameters(), lr=0.1),
    },
}
"""What blocks find in place instead of `ALWAYS`, or beside it."""


def run(block: Block) -> None:
    """Run it, in a folder that both ranks share, and the docstrings of one file: one saves, one loads."""
    of_its_own = block.given not in ("docstrings", "local steps")
    folder = Path(os.environ[FOLDER]) / block.page.stem / (str(block.line) if of_its_own else "")
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    names = Names(ALWAYS | GIVEN[block.given])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Converting a tensor")  # torch's, of a loss with a graph
            exec(compile(block.text, str(block), "exec"), names)  # that is what a reader does with it
        if isinstance(names.get("wire"), gradwire.Wire | gradwire.OuterWire) and "detach" not in block.text:
            names["wire"].detach()
    finally:
        os.chdir(before)
        logging.getLogger().handlers.clear()
        names.clear()  # functions of the block's hold them, and the wire holds those


BLOCKS = [block for block in blocks("python") if not block.not_run]
