"""Character-level language modelling: a small transformer, text and AdamW."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire_lab.data import TextSet
from gradwire_lab.workloads.base import Batch, Parameters, Shards, check_rank, generator, seeded
from gradwire_lab.workloads.models import CharGPT

_TEST_WINDOWS = 64


@dataclass(frozen=True)
class Size:
    """The transformer's shape; `length` is the number of characters that it sees."""

    width: int = 256
    depth: int = 3
    heads: int = 4
    length: int = 64


class TextWorkload:
    """Trains a `CharGPT` on `data`, from `batch_size` windows of `size.length` characters."""

    bucket_cap_mb = None
    policy = None

    def __init__(self, name: str, size: Size, data: TextSet, shards: Shards, batch_size: int) -> None:
        self.name = name
        self.batch_size = batch_size
        self._size = size
        self._data = data
        self._shards = shards
        self._learning_rate = 1e-3

    def model(self, seed: int) -> nn.Module:
        size = self._size
        with seeded(seed):
            return CharGPT(len(self._data.vocabulary), size.width, size.depth, size.heads, size.length)

    def optimizer(self, params: Parameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, self._learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def batches(self, rank: int, world: int, seed: int) -> Iterator[Batch]:
        check_rank(rank, world)
        windows = len(self._data.train) // (self._size.length + 1)
        if len(self._data.test) <= self._size.length:
            raise ValueError(
                f"the held-out text has {len(self._data.test)} characters, fewer than one window of "
                f"{self._size.length + 1}"
            )
        if windows < world:
            raise ValueError(f"the training text holds {windows} windows, too few for {world} ranks")
        return self._endless(self.shard(rank, world, seed), rank, seed)

    def shard(self, rank: int, world: int, seed: int) -> Tensor:
        """Numbers of the windows of length + 1 characters that belong to `rank` of `world`.

        "iid" deals the windows out at random, by `seed`; "skewed" divides the text into one stretch per rank.
        """
        windows = len(self._data.train) // (self._size.length + 1)
        each = windows // world
        if self._shards == "skewed":
            return torch.arange(rank * each, (rank + 1) * each)
        return torch.randperm(windows, generator=generator(seed))[rank : each * world : world]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        codes, following = batch
        return functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        training = model.training
        model.eval()
        windows = len(self._data.test) // (self._size.length + 1)
        chosen = torch.linspace(0, windows - 1, min(_TEST_WINDOWS, windows)).long()
        codes, following = self._batch(self._data.test, chosen)
        logits = model(codes).flatten(0, 1)
        model.train(training)
        right = (logits.argmax(dim=1) == following.flatten()).float().mean()
        loss = functional.cross_entropy(logits, following.flatten())
        return {"test_accuracy": float(right), "test_loss": float(loss)}

    def describe(self) -> dict[str, Any]:
        size = self._size
        return {
            "name": self.name,
            "parameters": sum(p.numel() for p in self.model(0).parameters()),
            "model": f"{size.depth} layers, width {size.width}, {size.heads} heads, {size.length} characters",
            "data": self._data.source,
            "train_examples": len(self._data.train) // (size.length + 1),
            "vocabulary": len(self._data.vocabulary),
            "batch_size": self.batch_size,
            "shards": self._shards,
            "optimizer": f"AdamW(lr={self._learning_rate}, betas=(0.9, 0.95), weight_decay=0.1)",
        }

    def _endless(self, mine: Tensor, rank: int, seed: int) -> Iterator[Batch]:
        stream = generator(seed, rank)
        while True:
            chosen = mine[torch.randint(len(mine), (self.batch_size,), generator=stream)]
            yield self._batch(self._data.train, chosen)

    def _batch(self, text: Tensor, windows: Tensor) -> Batch:
        """Characters and the characters that follow them, both (n, length) int64."""
        length = self._size.length
        place = windows.unsqueeze(1) * (length + 1) + torch.arange(length + 1)
        codes = text[place].long()
        return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()
