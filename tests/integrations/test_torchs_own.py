"""torch's own tests of DistributedDataParallel, with a `dense` wire attached to every module that they wrap.

They come with torch. What they expect of DDP on two ranks over gloo has to hold with gradwire as well.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.nn.parallel import DistributedDataParallel

import gradwire

VARIABLES = {
    "BACKEND": "gloo",
    "WORLD_SIZE": "2",
    "GLOO_SOCKET_IFNAME": "lo",
    "TEMP_DIR": os.environ.get("TEMP_DIR", tempfile.gettempdir()),
}
"""The module below reads them when it is loaded, and its tests do. Other tests must not see them: what a
launcher sets is among them."""

with (
    mock.patch.dict(os.environ, VARIABLES),
    warnings.catch_warnings(action="ignore"),
):  # torch warns of itself
    from torch.testing._internal.distributed import distributed_test as torchs

SECOND_HOOK = "registers a hook of its own, which DDP refuses where any hook has been registered"
EXCLUDED = {
    "test_accumulate_gradients_no_sync_allreduce_hook": SECOND_HOOK,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": SECOND_HOOK,
}

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("default"),  # torch's own
]

_FORKED: Any = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload([__name__])


def _attach_to_all() -> None:
    wrap = DistributedDataParallel.__init__

    def wrapped(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        wrap(self, *arguments, **options)
        gradwire.attach(self, recipe="dense")

    DistributedDataParallel.__init__ = wrapped  # type: ignore[method-assign]


class TestWithWires(torchs.TestDistBackend, torchs.DistributedTest._DistTestBase):
    """Each test runs in ranks that are forked from one process, which has loaded torch."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.enterClassContext(mock.patch.dict(os.environ, VARIABLES))
        super().setUpClass()

    def setUp(self) -> None:
        super().setUp()
        self.file_name = str(Path(os.environ["TEMP_DIR"], "store"))
        self._start_processes(_FORKED.Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **options: Any) -> None:
        os.environ |= {**VARIABLES, "TEMP_DIR": str(Path(file_name).parent)}
        _attach_to_all()
        super()._run(rank, test_name, file_name, pipe, **options)


def _source(name: str, seen: set[str]) -> str:
    """The source of a method with that of the methods that it calls."""
    seen.add(name)
    text = inspect.getsource(getattr(TestWithWires, name))
    called = {each for each in re.findall(r"self\.(_\w+)\(", text) if hasattr(TestWithWires, each)}
    return text + "".join(_source(each, seen) for each in called - seen)


def _is_wanted(name: str) -> bool:
    """Whether the test wraps a model. Those that torch itself skips without GPUs are left out."""
    is_skipped = getattr(getattr(TestWithWires, name), "__unittest_skip__", False)
    wraps = re.search(r"DistributedDataParallel\(|DDP\(", _source(name, set()))
    return wraps is not None and not is_skipped and name not in EXCLUDED


ALL = {each for each in dir(TestWithWires) if each.startswith("test_")}
WANTED = {each for each in ALL if _is_wanted(each)}
for _name in ALL - WANTED - {"test_ddp_has_finalized"}:  # which is skipped, and which `setUp` looks at
    setattr(TestWithWires, _name, None)  # which is no test


def test_there_are_some() -> None:
    assert len(WANTED) >= 9, "torch has renamed them, or what marks a skipped one"
