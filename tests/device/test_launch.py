"""On which device a kernel is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradwire.kernels.device.launch import launch


class _Noting:
    """A kernel that notes within which devices it runs."""

    def __init__(self) -> None:
        self.entered: list[torch.device] = []
        self.seen: list[list[torch.device]] = []

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        return lambda *_arguments, **_named: self.seen.append(list(self.entered))

    @contextmanager
    def within(self, device: torch.device) -> Iterator[None]:
        self.entered.append(device)
        yield
        self.entered.pop()


def test_a_kernel_runs_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _Noting()
    monkeypatch.setattr(torch.cuda, "device", kernel.within)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode():
        here, there = (torch.empty(2, device=f"cuda:{index}") for index in range(2))
    launch(kernel, 1, 5, there)
    launch(kernel, 1, 5, here)
    launch(kernel, 1, torch.empty(2))
    assert kernel.seen == [[torch.device("cuda:1")], [], []]
    assert kernel.entered == []
