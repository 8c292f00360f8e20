"""Who trains on what: disjoint, equally long shards of a labelled data set."""

from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.lab.workloads.base import generator

Shards = Literal["iid", "skewed"]


def check_shards(shards: str) -> None:
    """Raise `ValueError` unless `shards` is one of the known ways to split."""
    if shards not in get_args(Shards):
        raise ValueError(f"shards={shards!r} must be one of {', '.join(get_args(Shards))}")


def shard(labels: Tensor, rank: int, world: int, seed: int, shards: Shards) -> Tensor:
    """Indices of `rank`'s examples; every rank gets len(labels) // world, the remainder is left out.

    "iid" deals a shuffled deck. "skewed" sorts by label and cuts the result into `world` runs, so that two
    ranks share one class at most: with ten classes and two ranks, five classes each.
    """
    order = torch.randperm(len(labels), generator=generator(seed))
    each = len(labels) // world
    if shards == "iid":
        return order[rank : each * world : world]
    by_label = order[torch.sort(labels[order], stable=True).indices]
    return by_label[rank * each : (rank + 1) * each]
