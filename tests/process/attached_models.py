"""A model, its optimizer and its wire, from every source of gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.process import sharded_models
from tests.support.models import optimizer_of, perceptron

NODES = ((0, 1), (2, 3))
Made = tuple[nn.Module, torch.optim.Optimizer, gradwire.Wire]


def ddp(recipe: str, **options: Any) -> Made:
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(model)
    return model, optimizer, gradwire.attach(model, optimizer, recipe, **options)


def plain(recipe: str, **options: Any) -> Made:
    model = perceptron()
    optimizer, replicas = optimizer_of(model), dist.group.WORLD
    return model, optimizer, gradwire.attach(model, optimizer, recipe, replicas=replicas, **options)


def hsdp(recipe: str, **options: Any) -> Made:
    model = sharded_models.sharded()
    return model, *sharded_models.attached(model, recipe, **options)
