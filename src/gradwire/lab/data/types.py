"""What a data set looks like to a workload, whatever it was read from."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """Labelled images: `images` is (n, channels, height, width) uint8, `labels` (n,) int64."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            raise ValueError(
                f"images must be (n, c, h, w) uint8, not {self.images.dtype} {self.images.shape}"
            )
        if self.labels.shape != self.images.shape[:1]:
            raise ValueError(f"{len(self.images)} images, but labels of shape {tuple(self.labels.shape)}")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageSet:
    """Two disjoint sets of examples; `source` says in words which data they are."""

    train: Examples
    test: Examples
    classes: int
    source: str


@dataclass(frozen=True)
class TextSet:
    """Two disjoint stretches of text as character codes (1-D uint8), indices into `vocabulary`."""

    train: Tensor
    test: Tensor
    vocabulary: str
    source: str
