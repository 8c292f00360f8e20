"""torch's own tests of training under FSDP2, with a `dense` wire attached to every model that they shard.

They do not come with torch. `GRADWIRE_TORCH` names a checkout of its repository at the tag of the installed
version, of which one folder is enough:

    git clone --depth 1 --filter=blob:none --sparse --branch v2.13.0 https://github.com/pytorch/pytorch
    git -C pytorch sparse-checkout set test/distributed/_composable/fsdp
    GRADWIRE_TORCH=pytorch python -m pytest tests/integrations/test_torchs_fsdp.py

Only cases that torch runs on a CPU are taken, in worlds of at most four. Models on meshes of several
dimensions, which a wire refuses, train without one. A case that has no other models is skipped.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.testing._internal.common_distributed import TEST_SKIPS
from torch.testing._internal.common_fsdp import FSDPTest
from torch.testing._internal.common_utils import set_rng_seed
from torch.utils._python_dispatch import _disable_current_modes

import gradwire

CHECKOUT = os.environ.get("GRADWIRE_TORCH", "")
WORLD = 4

pytestmark = [
    pytest.mark.process,
    pytest.mark.rest,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # torch's own
    pytest.mark.skipif(not CHECKOUT, reason="GRADWIRE_TORCH names no checkout of torch's repository"),
]


class Attached:
    """Attaches where FSDP2 takes a module for a root: before its first forward pass."""

    def __init__(self) -> None:
        self.carried = self.refused = 0
        """Models."""

    def to_all(self) -> None:
        """From now on."""
        begin = FSDPState._lazy_init

        def begun(state: Any) -> None:
            is_new = state._is_root is None
            begin(state)
            if is_new and state._is_root:
                self._to(state._modules[0])

        FSDPState._lazy_init = begun  # type: ignore[method-assign]

    def _to(self, model: Any) -> None:
        try:
            with _disable_current_modes():  # a case may count its collectives, without those of `attach`
                gradwire.attach(model, None, "dense")
        except ValueError as error:
            if "the model is sharded on a mesh of" not in str(error):
                raise
            self.refused += 1
        else:
            self.carried += 1


class WithWires:
    """What replaces torch's way to run a test on a rank, which asks for as many GPUs."""

    @property
    def world_size(self) -> int:
        return min(WORLD, int(super().world_size))  # type: ignore[misc]

    def _spawn_processes(self) -> None:
        """Forked ranks import nothing again, which takes longer than most cases."""
        started: Any = self
        started._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **_: Any) -> None:
        self: Any = cls(test_name)  # type: ignore[call-arg]
        self.rank, self.file_name = rank, file_name
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        where = {"init_method": self.init_method, "world_size": self.world_size, "rank": rank}
        dist.init_process_group("gloo", **where)
        attached = Attached()
        attached.to_all()
        set_rng_seed()
        self.run_test(test_name, pipe)
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            print(f"{test_name}: models with a wire {attached.carried}, refused {attached.refused}")
        if attached.refused and not attached.carried:
            sys.exit(TEST_SKIPS["generic"].exit_code)


def _suits(source: str) -> bool:
    """Whether a case runs on a CPU, on as few ranks as here."""
    found = re.search(r"skip_if_lt_x_gpu\((\d+), allow_cpu=True\)", source)
    return found is not None and int(found[1]) <= WORLD


def _with_wires() -> dict[str, type]:
    """torch's classes of tests, with the cases for a CPU."""
    folder = Path(CHECKOUT, "test", "distributed", "_composable", "fsdp").resolve()
    sys.path.insert(0, str(folder))
    torchs = importlib.import_module("test_fully_shard_training")
    found = {}
    for name, each in inspect.getmembers(torchs, inspect.isclass):
        if not issubclass(each, FSDPTest) or each is FSDPTest:
            continue
        cases = [case for case in dir(each) if case.startswith("test_")]
        wanted = [case for case in cases if _suits(inspect.getsource(getattr(each, case)))]
        if wanted:
            others: dict[str, Any] = dict.fromkeys(set(cases) - set(wanted))
            found[name] = type(name, (WithWires, each), {"__module__": __name__, **others})
    return found


CLASSES = _with_wires() if CHECKOUT else {}
globals().update(CLASSES)


def test_there_are_some() -> None:
    assert CLASSES, "torch has renamed them, or what marks those for a CPU"
