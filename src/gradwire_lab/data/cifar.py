"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) in their "python version": pickled dictionaries.

A pickle can run any code, so this reader builds nothing but numbers, bytes, strings, lists, dictionaries and
plain numpy arrays, and refuses a file that asks for anything else.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire_lab.data.images import Examples, ImageSet

_LABELS = (b"fine_labels", b"labels")


def is_cifar(folder: Path) -> bool:
    """Whether `folder` looks like an unpacked CIFAR archive."""
    return (folder / "data_batch_1").is_file() or (
        (folder / "train").is_file() and (folder / "meta").is_file()
    )


def cifar(folder: Path) -> ImageSet:
    """Reads CIFAR-10 (`data_batch_*`, `test_batch`) or CIFAR-100 (`train`, `test`; fine labels)."""
    batches = sorted(folder.glob("data_batch_*")) or [folder / "train"]
    test = folder / ("test_batch" if (folder / "data_batch_1").is_file() else "test")
    train_set, test_set = _examples(batches), _examples([test])
    classes = 100 if int(train_set.labels.max()) > 9 else 10
    return ImageSet(train_set, test_set, classes, f"CIFAR-{classes} from {folder.name}")


def unpickle(content: bytes, name: str) -> Any:
    """Plain data from a pickle; `ValueError` for one that would build, import or call anything else."""
    try:
        return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:
        # whatever a broken or hostile file provokes, the caller learns one thing: it is not a CIFAR batch
        raise ValueError(f"{name} is not a CIFAR batch: {error}") from error


class _Ndarray:
    """Stands for `numpy.ndarray`, which a pickle could call with a buffer full of forged pointers."""


_NDARRAY = _Ndarray()


def _array(subtype: object, shape: tuple[int, ...], _kind: bytes) -> np.ndarray[Any, Any]:
    # numpy pickles an array as an empty one whose state is then set
    if subtype is not _NDARRAY or tuple(shape) != (0,):
        raise pickle.UnpicklingError(f"an array of type {subtype} and shape {shape}")
    return np.empty(0, dtype=np.uint8)


def _dtype(code: bytes | str, _align: bool = False, _copy: bool = True) -> np.dtype[Any]:
    text = code.decode("ascii") if isinstance(code, bytes) else code
    if text not in ("u1", "|u1", "i8", "<i8"):
        raise pickle.UnpicklingError(f"an array of dtype {text!r}")
    return np.dtype(text)


def _encode(text: str, encoding: str) -> bytes:
    return text.encode("latin-1")  # how Python 3 writes bytes into a protocol-2 pickle


_ALLOWED: dict[tuple[str, str], Callable[..., Any] | _Ndarray] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return _ALLOWED[module, name]


def _examples(paths: list[Path]) -> Examples:
    pixels, labels = zip(*(_batch(path) for path in paths), strict=True)
    return Examples(torch.from_numpy(np.concatenate(pixels)), torch.from_numpy(np.concatenate(labels)))


def _batch(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; unpack the whole archive of the python version of CIFAR")
    content = unpickle(path.read_bytes(), path.name)
    key = next((k for k in _LABELS if isinstance(content, dict) and k in content), None)
    data = content.get(b"data") if key else None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,):
        raise ValueError(f"{path} has no images of 3072 bytes under 'data' beside 'labels' or 'fine_labels'")
    return data.reshape(-1, 3, 32, 32), np.asarray(content[key], dtype=np.int64)
