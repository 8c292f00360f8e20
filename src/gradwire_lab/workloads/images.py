"""Image classification: a network, labelled images and SGD with momentum."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire_lab.data import Examples, ImageSet
from gradwire_lab.workloads.base import Batch, Parameters, Shards, check_rank, generator, seeded, shard

SIDE = 32  # smaller images are padded to this height and width
_TEST_BATCH = 250


@dataclass(frozen=True)
class TrainingRecipe:
    """A network and the settings that train it: `build(channels, classes)`, learning rate, and so on."""

    build: Callable[[int, int], nn.Module]
    batch_size: int
    learning_rate: float
    momentum: float = 0.9
    weight_decay: float = 5e-4


class ImageWorkload:
    """Trains `recipe.build(...)` on `data`, from `batch_size` images per rank and step."""

    bucket_cap_mb = None
    policy = None

    def __init__(
        self, name: str, recipe: TrainingRecipe, data: ImageSet, shards: Shards, batch_size: int
    ) -> None:
        self.name = name
        self.batch_size = batch_size
        self._recipe = recipe
        self._data = data
        self._shards = shards
        pixels = data.train.images.float().div_(255)
        self._mean = pixels.mean(dim=(0, 2, 3)).view(-1, 1, 1)
        self._std = pixels.std(dim=(0, 2, 3)).clamp_min(1e-3).view(-1, 1, 1)

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return self._recipe.build(self._data.train.images.shape[1], self._data.classes)

    def optimizer(self, params: Parameters) -> torch.optim.Optimizer:
        recipe = self._recipe
        return torch.optim.SGD(
            params, recipe.learning_rate, recipe.momentum, weight_decay=recipe.weight_decay
        )

    def batches(self, rank: int, world: int, seed: int) -> Iterator[Batch]:
        mine = self.shard(rank, world, seed)
        if len(mine) < self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} exceeds rank {rank}'s shard of {len(mine)} images"
            )
        return self._endless(mine, rank, seed)

    def shard(self, rank: int, world: int, seed: int) -> Tensor:
        """Indices of the training images that belong to `rank` of `world`, shuffled by `seed`."""
        check_rank(rank, world)
        return shard(self._data.train.labels, rank, world, seed, self._shards)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        training = model.training
        model.eval()
        loss, right, test = 0.0, 0, self._data.test
        for start in range(0, len(test), _TEST_BATCH):
            indices = torch.arange(start, min(start + _TEST_BATCH, len(test)))
            images, labels = self._batch(test, indices)
            logits = model(images)
            loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
            right += int((logits.argmax(dim=1) == labels).sum())
        model.train(training)
        return {"test_accuracy": right / len(test), "test_loss": loss / len(test)}

    def describe(self) -> dict[str, Any]:
        recipe = self._recipe
        return {
            "name": self.name,
            "parameters": sum(p.numel() for p in self.model(0).parameters()),
            "data": self._data.source,
            "train_examples": len(self._data.train),
            "test_examples": len(self._data.test),
            "batch_size": self.batch_size,
            "shards": self._shards,
            "optimizer": f"SGD(lr={recipe.learning_rate}, momentum={recipe.momentum}, "
            f"weight_decay={recipe.weight_decay})",
        }

    def _endless(self, mine: Tensor, rank: int, seed: int) -> Iterator[Batch]:
        epoch = 0
        while True:
            order = mine[torch.randperm(len(mine), generator=generator(seed, rank, epoch))]
            for start in range(0, len(mine) - self.batch_size + 1, self.batch_size):
                yield self._batch(self._data.train, order[start : start + self.batch_size])
            epoch += 1

    def _batch(self, examples: Examples, indices: Tensor) -> Batch:
        """Normalised to mean 0 and deviation 1 per channel, then padded (with black, before normalising)."""
        images = examples.images[indices]
        missing = max(SIDE - images.shape[-1], 0)
        padded = functional.pad(images, (missing // 2, missing - missing // 2) * 2)
        return (padded.float().div_(255) - self._mean) / self._std, examples.labels[indices]
