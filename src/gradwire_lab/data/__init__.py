"""Data for workloads: vendored slices, installed full sets, and the user's own files.

>>> from gradwire_lab.data import load_images
>>> load_images(full=False).source
'Fashion-MNIST, vendored slice of 1,200 + 200 images per class'
"""

from pathlib import Path

from gradwire_lab.data.cifar import cifar, is_cifar
from gradwire_lab.data.images import (
    Examples,
    ImageSet,
    fashion_mnist,
    idx_files,
    idx_folder,
    image_folder,
)
from gradwire_lab.data.text import TextSet, shakespeare, text_file

__all__ = ["Examples", "ImageSet", "TextSet", "load_images", "load_text"]


def load_images(path: Path | None = None, *, full: bool = True) -> ImageSet:
    """Fashion-MNIST, or what `path` holds: CIFAR python batches, IDX files, or an image folder.

    Args:
        full: use an installed full set rather than the vendored slice; ignored when `path` is given.
    """
    if path is None:
        return fashion_mnist(full=full)
    if not path.is_dir():
        raise ValueError(
            f"data={path} is not a folder; images come as CIFAR batches, IDX files or an image folder"
        )
    if is_cifar(path):
        return cifar(path)
    return idx_folder(path, f"IDX files in {path.name}") if idx_files(path) else image_folder(path)


def load_text(path: Path | None = None, *, full: bool = True) -> TextSet:
    """Shakespeare, or the UTF-8 text file at `path`; `full` as in `load_images`."""
    if path is None:
        return shakespeare(full=full)
    if not path.is_file():
        raise ValueError(f"data={path} is not a file; text workloads take one UTF-8 text file")
    return text_file(path)
