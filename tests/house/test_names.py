"""Names that pages for engineers and docstrings quote: each is in the code, or is the name of a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests.support.source import MODULES, PACKAGES, ROOT, SRC

PAGES = (*sorted((ROOT / "docs" / "engineering").glob("*.md")), ROOT / "docs" / "glossary.md")
ABSENT = {
    "Accelerator.register_for_checkpointing": "Accelerate's",
    "ATen/core/CachingHostAllocator.h": "torch's",
    "NCCL_ALGO": "NCCL's",
    "_root_post_backward_final_callback": "torch's",
    "benchmarks/results/2026-11-24-auto.md": "at an older commit",
    "bucket_cap_mb_list": "torch's",
    "compress.py": "the authors' of SparseLoCo",
    "finalize_backward": "torch's",
    "foreach_reduce": "torch's",
    "FSDPParamGroup": "torch's",
    "gradwire.explore": "the page says that it is gone",
    "numba.core.caching": "Numba's",
    "reduce_scatter_with_fp32_accumulation": "torch's",
    "set_all_reduce_hook": "torch's",
    "tcp_info": "Linux's",
    "tcpi_bytes_acked": "Linux's",
    "tcpi_bytes_received": "Linux's",
    "tcpi_min_rtt": "Linux's",
    "tensorboard_trace_handler": "torch's",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch's",
    "torch/distributed/fsdp/_fully_shard/": "torch's",
    "unsent_r": "notation",
}
"""Names that the code does not have, and why they are quoted."""
_TOPS = (ROOT, *(SRC / package for package in PACKAGES))
_FOLDERS = {path.name for top in _TOPS for path in top.iterdir() if path.is_dir()}


def test_pages_for_engineers_name_what_there_is() -> None:
    quoted = {page.name: page.read_text("utf-8") for page in PAGES}
    assert [f"{page}: {name}" for page, text in quoted.items() for name in unknown(text)] == []


def test_docstrings_name_what_there_is() -> None:
    docstring = re.compile(r'"""(.*?)"""', re.DOTALL)
    quoted = {
        module.name: "\n".join(docstring.findall(module.path.read_text("utf-8")))
        for module in MODULES
        if not module.name.startswith("gradwire_lab.")
    }
    assert [f"{module}: {name}" for module, text in quoted.items() for name in unknown(text)] == []


def test_a_name_that_is_gone_is_found() -> None:
    there = "`Findings.idle`, `test_nothing_is_…`, `tests/house/`, `step/reducer.py`, `import-linter`"
    gone = "`Findings.commit`, `step/gone.py: _go(x)`, `no_such`, `no_such_test_…`"
    assert list(unknown(there)) == []
    assert list(unknown(gone)) == ["Findings.commit", "step/gone.py", "_go", "no_such", "no_such_test_…"]


def unknown(text: str) -> Iterator[str]:
    """Paths and names in backticks that are nowhere in the repository."""
    for quoted in dict.fromkeys(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))):
        for word in re.findall(r"[\w./-]*/[\w./-]*|\w[\w-]*\.(?:py|md|toml)\b|\b[A-Za-z_][\w.]*…?", quoted):
            if word in ABSENT:
                continue
            if re.search(r"\.(py|md|toml)$", word) or ("/" in word and word.split("/")[0] in _FOLDERS):
                if not any(f"/{word}" in each for each in files()):
                    yield word
            elif word.endswith("…"):
                if not any(each.startswith(word[:-1]) for each in names()):
                    yield word
            elif "/" not in word and is_gone(word):
                yield word


def is_gone(word: str) -> bool:
    """Whether a part of a dotted name is no name of the code, or no member of the class before it."""
    parts = re.findall(r"[A-Za-z_]\w*", word)
    if any(part not in names() for part in parts):
        return True
    return any(
        owner[0].isupper() and member not in members(owner)
        for owner, member in pairwise(parts)
        if members(owner)
    )


@cache
def files() -> frozenset[str]:
    """Paths of all files and folders; folders end with a slash."""
    tops = [ROOT / name for name in ("src", "tests", "docs", "benchmarks", "examples", ".github")]
    found = [*ROOT.glob("*"), *tops, *(path for top in tops for path in top.rglob("*"))]
    return frozenset(f"/{path.relative_to(ROOT)}" + "/" * path.is_dir() for path in found)


@cache
def names() -> frozenset[str]:
    """All words of the code outside of docstrings and comments, names of its files, and words of others."""
    found = set[str]()
    for top in ("src", "tests", "benchmarks", "examples"):
        for path in {*(ROOT / top).rglob("*.py")} - {Path(__file__)}:
            found.update([path.stem, *path.parent.relative_to(ROOT).parts])
            text = re.sub(r'"""(.*?)"""', "", path.read_text("utf-8"), flags=re.DOTALL)
            found.update(re.findall(r"\w+", re.sub(r"(^|  )#.*", "", text, flags=re.MULTILINE)))
    for path in (ROOT / "Makefile", ROOT / "pyproject.toml"):
        found.update(re.findall(r"\w+", path.read_text("utf-8")))
    return frozenset(found)


@cache
def members(owner: str) -> frozenset[str]:
    """All names in the classes called `owner`; none if there is no such class, or one inherits others."""
    found = set[str]()
    for module in MODULES:
        if f"class {owner}" in module.path.read_text("utf-8"):
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef) and node.name == owner:
                    if any(not isinstance(base, ast.Name) or base.id != "NamedTuple" for base in node.bases):
                        return frozenset()
                    found.update(_named(node))
    return frozenset(found)


def _named(tree: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "name"):
            if isinstance(value := getattr(node, field, None), str):
                yield value
