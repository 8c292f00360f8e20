"""The interface of a workload, its random numbers, and the shards of its data."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Parameters = Iterable[nn.Parameter]


class Workload(Protocol):
    """Something to train: a model, its data and the settings that suit both.

    Every rank builds its own; equal seeds give equal models and, rank by rank, equal batches.
    """

    @property
    def name(self) -> str: ...

    @property
    def bucket_cap_mb(self) -> float | None:
        """Size of DDP's buckets in MB: smaller for a model that was shrunk. None is DDP's own."""
        ...

    @property
    def policy(self) -> str | None:
        """Policy for all recipes, as `gradwire bench` takes it; None is the default policy."""
        ...

    def model(self, seed: int) -> nn.Module:
        """A new model, a function of `seed` alone; the global random generator is left as it was."""
        ...

    def optimizer(self, params: Parameters) -> torch.optim.Optimizer:
        """The optimizer that goes with this workload, over `params`."""
        ...

    def batches(self, rank: int, world: int, seed: int) -> Iterator[Batch]:
        """Batches of `rank`'s shard without end; the shards of the `world` ranks are disjoint."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The scalar to differentiate; calls `model` (which may be wrapped) exactly once."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on held-out data, such as `test_accuracy` in [0, 1]; empty where there are none."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts about this workload for a report, ready for JSON."""
        ...


class seeded:
    """Context in which torch's global CPU generator starts from `seed`; afterwards it is as before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._before = torch.get_rng_state()
        torch.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._before)


def generator(*key: int) -> torch.Generator:
    """A private generator that is a function of `key`, for instance (seed, rank, epoch)."""
    state = 0
    for part in key:
        # a linear congruential step per part, so that (1, 2) and (2, 1) differ
        state = (state * 6364136223846793005 + part + 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(state)


def check_rank(rank: int, world: int) -> None:
    """Raise `ValueError` unless 0 <= rank < world."""
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} must be in 0..{world - 1} in a world of {world}")


Shards = Literal["iid", "skewed"]


def check_shards(shards: str) -> None:
    """Raise `ValueError` unless `shards` is one of the known ways to split."""
    if shards not in get_args(Shards):
        raise ValueError(f"shards={shards!r} must be one of {', '.join(get_args(Shards))}")


def shard(labels: Tensor, rank: int, world: int, seed: int, shards: Shards) -> Tensor:
    """Indices of `rank`'s examples among `world`, by their `labels`; every rank gets len(labels) // world,
    the remainder is left out.

    "iid" deals a deck that is shuffled by `seed`. "skewed" sorts by label and divides the result into `world`
    runs, so that two ranks share one class at most: with ten classes and two ranks, five classes each.
    """
    order = torch.randperm(len(labels), generator=generator(seed))
    each = len(labels) // world
    if shards == "iid":
        return order[rank : each * world : world]
    by_label = order[torch.sort(labels[order], stable=True).indices]
    return by_label[rank * each : (rank + 1) * each]
