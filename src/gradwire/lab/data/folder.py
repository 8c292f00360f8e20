"""A folder of pictures: one sub-folder per class, PNG or JPEG, read through Pillow where it is installed."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire.lab.data.types import Examples, ImageSet

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
