"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): 28x28 grey images of ten kinds of clothes.

The package carries a class-balanced slice, so that tests and the demo run offline; where Debian's package
`dataset-fashion-mnist` is installed, the full 60,000 + 10,000 images are used instead.
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch

from gradwire.lab.data.idx import Bytes, read_idx, write_idx
from gradwire.lab.data.types import Examples, ImageSet

INSTALLED = Path("/usr/share/datasets/fashion-mnist")
VENDORED = Path(__file__).parent / "vendored"
CLASSES = 10
_SLICE = {"train": 1200, "t10k": 200}  # images per class


def fashion_mnist(*, full: bool = True) -> ImageSet:
    """The full set where it is installed and `full` is true, else the slice in this package."""
    if full and idx_files(INSTALLED):
        return idx_folder(INSTALLED, "Fashion-MNIST, full set")
    return _vendored()


def idx_files(folder: Path) -> list[Path]:
    """The four files of an MNIST-like set in `folder`, or an empty list when one is missing."""
    found = [path for stem in _stems() for path in sorted(folder.glob(f"{stem}*"))[:1]]
    return found if len(found) == 4 else []


def idx_folder(folder: Path, source: str) -> ImageSet:
    """Reads the four IDX files of an MNIST-like set."""
    images, labels, test_images, test_labels = (read_idx(path) for path in idx_files(folder))
    return ImageSet(
        _examples(images, labels), _examples(test_images, test_labels), int(labels.max()) + 1, source
    )


def write_slice(full: Path, target: Path) -> None:
    """Writes the vendored slice: the first images of every class, in the order of the full set."""
    for part, per_class in _SLICE.items():
        images, labels = (read_idx(path) for path in idx_files(full) if path.name.startswith(part))
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in range(CLASSES)]))
        write_idx(target / f"{part}-images-idx3-ubyte.xz", images[chosen])
        write_idx(target / f"{part}-labels-idx1-ubyte.xz", labels[chosen])


@cache
def _vendored() -> ImageSet:
    return idx_folder(VENDORED, "Fashion-MNIST, vendored slice of 1,200 + 200 images per class")


def _stems() -> list[str]:
    return [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def _examples(images: Bytes, labels: Bytes) -> Examples:
    # `read_idx` hands out read-only memory; torch wants memory that it may own
    return Examples(torch.from_numpy(images.copy()).unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))
