"""What every workload offers to a bench run."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

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
    def batch_size(self) -> int:
        """Samples per rank and step."""
        ...

    @property
    def bucket_cap_mb(self) -> float | None:
        """DDP's bucket size where its own would not suit the model: shrunk like that. None: DDP's own."""
        ...

    @property
    def policy(self) -> str | None:
        """Of all recipes, as `gradwire bench` takes it, where the default would not suit the model."""
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
        """What a report has to say about this workload, ready for JSON."""
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
