"""Labelled images: IDX files (the MNIST family), folders of pictures, and Fashion-MNIST.

Fashion-MNIST (Xiao, Rasul, Vollgraf 2017) is 28x28 grey images of ten kinds of clothes. The package carries a
class-balanced slice, so that tests and the demo run offline; where Debian's package `dataset-fashion-mnist`
is installed, the full 60,000 + 10,000 images are used instead.
"""

import gzip
import importlib
import lzma
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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


Bytes = NDArray[np.uint8]

_UNSIGNED_BYTE = 0x08
_OPENERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}


def read_idx(path: Path) -> Bytes:
    """The array of unsigned bytes in `path`; `ValueError` when its header and its length disagree."""
    raw = path.read_bytes()
    try:
        content = _OPENERS[path.suffix](raw) if path.suffix in _OPENERS else raw
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise ValueError(f"{path} is not an IDX file of unsigned bytes: it starts with {content[:4]!r}")
    start = 4 + 4 * content[3]
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) != start + math.prod(shape):
        raise ValueError(f"{path} announces shape {shape} but holds {len(content) - start} bytes of values")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


INSTALLED = Path("/usr/share/datasets/fashion-mnist")
VENDORED = Path(__file__).parent / "vendored"
CLASSES = 10


def fashion_mnist(*, full: bool = True) -> ImageSet:
    """The full data set if it is installed and `full` is true, else the slice in this package."""
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


@cache
def _vendored() -> ImageSet:
    return idx_folder(VENDORED, "Fashion-MNIST, vendored slice of 1,200 + 200 images per class")


def _stems() -> list[str]:
    return [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def _examples(images: Bytes, labels: Bytes) -> Examples:
    # `read_idx` hands out read-only memory; torch wants memory that it may own
    return Examples(torch.from_numpy(images.copy()).unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))


SIZE = 32
_SUFFIXES = (".png", ".jpg", ".jpeg")
_TEST_EVERY = 6  # without a split of its own, every sixth picture of a class is held out


def image_folder(folder: Path) -> ImageSet:
    """Pictures resized to 32x32 RGB; `train/` and `test/` (or `val/`) above the classes are respected."""
    held_out = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if (folder / "train").is_dir() and held_out is not None:
        train, test = _labelled(folder / "train"), _labelled(held_out)
    else:
        every = _labelled(folder)
        train, test = {}, {}
        for name, paths in every.items():
            test[name] = paths[::_TEST_EVERY]
            train[name] = [path for number, path in enumerate(paths) if number % _TEST_EVERY]
    names = sorted(train)
    if len(names) < 2 or not set(test) <= set(names):
        raise ValueError(
            f"{folder} needs one sub-folder with PNG or JPEG files per class, two classes at least"
        )
    return ImageSet(_read(train, names), _read(test, names), len(names), f"image folder {folder.name}")


def _labelled(folder: Path) -> dict[str, list[Path]]:
    """Class name -> its pictures, sorted, for every sub-folder that holds any."""
    found = {
        sub.name: sorted(path for path in sub.iterdir() if path.suffix.lower() in _SUFFIXES)
        for sub in sorted(folder.iterdir())
        if sub.is_dir()
    }
    return {name: paths for name, paths in found.items() if paths}


def _read(classes: dict[str, list[Path]], names: list[str]) -> Examples:
    pillow = _pillow()
    pixels = [_pixels(pillow, path) for name in names for path in classes.get(name, [])]
    labels = [label for label, name in enumerate(names) for _ in classes.get(name, [])]
    if not pixels:
        raise ValueError("an image folder needs at least two pictures per class, so that one can be held out")
    return Examples(torch.from_numpy(np.stack(pixels)), torch.tensor(labels))


def _pixels(pillow: Any, path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        with pillow.open(path) as picture:
            small = picture.convert("RGB").resize((SIZE, SIZE))
    except OSError as error:
        raise ValueError(f"{path} can't be read as a picture: {error}") from error
    return np.asarray(small, dtype=np.uint8).transpose(2, 0, 1)


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise ValueError("reading an image folder needs Pillow: pip install pillow") from error
