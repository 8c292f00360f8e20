"""On how many GPUs a process takes memory, as `gradwire probe --check` counts it."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from gradwire.cli.gpu_check import contexts, on_one_gpu

MINE, OTHER = 10, 11


class Driver(ModuleType):
    """NVML on a machine of three GPUs, with the processes on each."""

    NVMLError = type("NVMLError", (Exception,), {})
    running: tuple[tuple[int, ...], ...] = ((), (), ())
    forbids = False

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)

    def nvmlInit(self) -> None:
        if self.forbids:
            raise self.NVMLError

    def nvmlDeviceGetCount(self) -> int:
        return len(self.running)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.running[gpu]]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """In the place of the real one, if there is one."""
    monkeypatch.setitem(sys.modules, "pynvml", found := Driver())
    return found


def test_gpus_that_know_this_process_are_counted(driver: Driver) -> None:
    driver.running = ((MINE, OTHER), (OTHER,), (MINE,))
    assert (contexts(MINE), contexts(OTHER), contexts(12)) == (2, 2, 0)


def test_where_nobody_says_nothing_is_counted(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.forbids = True
    assert contexts(MINE) == 0
    monkeypatch.setattr("gradwire.cli.gpu_check.find_spec", lambda _name: None)
    assert contexts(MINE) == 0


@pytest.mark.parametrize(
    ("counts", "said"),
    [((1, 1), "each rank on its own GPU"), ((1, 0), "skipped: NVML does not say"), ((1, 2), "rank 1 also")],
)
def test_a_second_context_is_a_fault(counts: tuple[int, ...], said: str) -> None:
    found = on_one_gpu(counts)
    assert found.said.startswith(said)
    assert bool(found.fault) == (max(counts) > 1)
