"""When kernels for devices are imported, and what becomes of a call where there can be none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch

from gradwire.kernels import dispatch
from gradwire.kernels.compensation import compensate
from gradwire.kernels.flagged import poison

ON_THE_CPU = """
import sys, torch
from gradwire.kernels.flagged import poison
from gradwire.kernels.compensation import compensate

x = torch.ones(9, dtype=torch.float64)
compensate(x, x, x, 1.0)
poison([x], torch.ones(()))
print([name for name in sys.modules if name.split(".")[0] == "triton" or name == "gradwire.kernels.device"])
"""


class OnDevice(torch.Tensor):
    """Says that it is on a GPU; float64, which no kernel takes."""

    is_cuda = True


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    """Of devices and of twins there."""
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.mark.rest
def test_tensors_on_the_cpu_import_nothing_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", ON_THE_CPU], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def computed_by_the_contract() -> bool:
    """Whether two kernels that devices have give what their contracts give."""
    x = OnDevice(torch.ones(4).double())
    found = compensate(x, None, torch.ones(4).double(), 1.0, 2.0)
    compensated = found.read() == ((), True) and x.tolist() == [2.0] * 4
    poison([x], torch.ones(()))
    return compensated and bool(x.isnan().all())


def triton_is(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as one looks for it."""
    found = object() if there else None
    monkeypatch.setattr(dispatch, "find_spec", lambda name: found if name == "triton" else find_spec(name))


def test_without_triton_the_contract_computes_there_and_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton_is(False, monkeypatch)
    trial = Mock()
    monkeypatch.setitem(sys.modules, "gradwire.kernels.device.trial", trial)
    assert computed_by_the_contract()
    trial.try_out.assert_not_called()


def test_where_triton_can_launch_nothing_the_contract_computes_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(_where: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("gradwire.kernels.device.trial.try_out", no_compiler)
    triton_is(True, monkeypatch)
    with caplog.at_level("WARNING", logger="gradwire"):
        assert computed_by_the_contract()
    [record] = caplog.records
    assert "plain torch computes instead" in record.message
    assert "C compiler" in record.message
