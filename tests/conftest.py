"""What all tests share: tiers, one thread per rank, and the seed of the sampled laws in the header."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.kernels import compiler
from tests.support.depth import DEPTH, FEW, FULL, seed

# Set before workers of pytest-xdist start, so that all of them sample the same rows.
os.environ.setdefault("GRADWIRE_LAWS_SEED", str(random.SystemRandom().randrange(10**6)))

os.environ.setdefault("GRADWIRE_CHECK_KERNELS", "1")

os.environ.setdefault("GRADWIRE_TIMED_EVERY", "1")
"""In tests all steps are timed, and what they send is metered and compared with what was announced."""

# A shell makes what runs in the background deaf to Ctrl-C, and children inherit that; tests send it to them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks are threads: a pool of more threads under each of them only makes them wait for each other.
torch.set_num_threads(1)

_WHOLE_FILE = re.compile(r"^pytestmark = .*\bmark\.rest\b", re.MULTILINE)
_ANY = re.compile(r"\brest\b")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that is left out as a whole is not even imported: that takes longer than many tests."""
    tier = config.option.markexpr
    if tier not in ("rest", "not rest") or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    is_out = not _ANY.search(text) if tier == "rest" else _WHOLE_FILE.search(text)
    return True if is_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that take minutes run where all rows are tried. Elsewhere they are left out, and are no skips."""
    if FULL:
        return
    config.hook.pytest_deselected(items=[each for each in items if each.get_closest_marker("full")])
    items[:] = [each for each in items if not each.get_closest_marker("full")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is loaded now stays: no later collection of garbage, one at each `attach` for one, looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_report_header() -> str:
    """How many rows of the laws are tried, and how to try the same ones again."""
    if FULL:
        return "laws: all rows"
    rows = "a few rows" if FEW else "a pairwise sample"
    again = f"GRADWIRE_LAWS={DEPTH} GRADWIRE_LAWS_SEED={seed()}"
    return f"laws: {rows}, again by {again} (GRADWIRE_LAWS is few, sample or full)"


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def world_in_company(monkeypatch: pytest.MonkeyPatch, world_of_one: None) -> None:
    """One rank that compresses as in company: what one alone does is in tests/unit/step/test_alone.py."""
    monkeypatch.setattr("gradwire._api.attach.is_alone", lambda _comm: False)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_type(request: pytest.FixtureRequest) -> Iterator[None]:
    """Other types than float32 that a user may have made the default of new tensors."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


def pytest_sessionstart() -> None:
    """Kernels that are not compiled yet are compiled by all workers, and each by one of them."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and find_spec("numba") is not None:
        compiler.prepare(compiler.every(), turn=int(worker.removeprefix("gw")))
