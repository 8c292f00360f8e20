"""When kernels for devices are imported, and what they are asked for."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import dispatch

ON_THE_CPU = """
import sys, torch
from gradwire import kernels

x = torch.ones(9, dtype=torch.float64)
kernels.fold(x, x, x, 1.0)
kernels.poison([x], torch.ones(()))
print([name for name in sys.modules if name.split(".")[0] == "triton" or name == "gradwire.kernels.device"])
"""


class OnDevice(torch.Tensor):
    """Says that it is elsewhere, as far as `on_device` asks; float64, which no kernel of the CPU takes."""

    is_cuda = True


def test_tensors_on_the_cpu_import_nothing_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", ON_THE_CPU], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fold", lambda x: (x, None, x, 1.0)),
        ("fold_momentum", lambda x: ((x, x), (x, x), x, 0.5)),
        ("poison", lambda x: ([x], torch.ones(()))),
    ],
)
def test_tensors_on_a_device_are_brought_there(
    name: str, arguments: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = SimpleNamespace(**{name: lambda *_arguments, **_named: "taken"})
    monkeypatch.setattr(dispatch, "_device_kernels", lambda _where: taken)
    assert callable(arguments)
    assert getattr(kernels, name)(*arguments(OnDevice(torch.ones(4).double()))) == "taken"


def test_without_triton_the_reference_computes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_device_kernels", lambda _where: None)
    x = OnDevice(torch.ones(4).double())
    assert dispatch.on_device("poison")([x], x) is dispatch.DECLINED


def test_where_triton_can_launch_nothing_the_reference_computes_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(_where: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler")

    known = {
        "gradwire.kernels.device": SimpleNamespace(),
        "gradwire.kernels.device.launch": SimpleNamespace(try_out=no_compiler),
    }
    monkeypatch.setattr(dispatch, "find_spec", lambda _name: True)
    monkeypatch.setattr(dispatch, "import_module", known.__getitem__)
    dispatch._device_kernels.cache_clear()
    try:
        x = OnDevice(torch.ones(4).double())
        with caplog.at_level("WARNING", logger="gradwire"):
            assert dispatch.on_device("poison")([x], x) is dispatch.DECLINED
            assert dispatch.on_device("fold")(x, None, x, 1.0) is dispatch.DECLINED
    finally:
        dispatch._device_kernels.cache_clear()
    [record] = caplog.records
    assert "plain torch computes instead" in record.message
    assert "C compiler" in record.message


@pytest.mark.parametrize("annotation", ["Tensor", "torch.Tensor", "list[Tensor]", "tuple[torch.Tensor, ...]"])
def test_a_contract_reaches_its_device_however_its_tensor_is_annotated(annotation: str) -> None:
    def contract(count: int, x: object) -> None: ...

    contract.__annotations__["x"] = annotation
    assert dispatch.asks_device(contract) in ("x.is_cuda", "(x and x[0].is_cuda)")


def test_every_kernel_for_devices_is_reached_by_its_first_tensor() -> None:
    pytest.importorskip("triton", reason="kernels for devices need Triton")
    from gradwire.kernels import device, reference

    for name in device.__all__:
        asked = dispatch.asks_device(getattr(reference, name))
        assert asked.endswith((".is_cuda", "[0].is_cuda)")), name
