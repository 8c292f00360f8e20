"""Contracts and their twins: names and signatures, checks in front of both, and who computes."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gradwire.kernels import dispatch
from gradwire.kernels.dispatch import Kernels
from gradwire.kernels.places import take
from gradwire.kernels.topk import topk_indices
from gradwire.kernels.truncation import pack_upper
from tests.support.source import ROOT
from tests.support.twins import CONTRACTS, KERNELS, Twins, files

FOLDERS = ["cpu", *(["device"] if find_spec("triton") is not None else [])]


def twins(folder: str) -> dict[str, Callable[..., object]]:
    """The twins that a folder has, by name."""
    there = Twins(folder)
    return {name: getattr(there, name) for name in CONTRACTS if hasattr(there, name)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_twins_have_the_signatures_of_their_contracts(folder: str) -> None:
    for name, twin in twins(folder).items():
        one, other = (inspect.signature(each, eval_str=True) for each in (twin, CONTRACTS[name].plain))
        assert one == other, name


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_public_function_of_a_file_of_twins_is_a_twin(folder: str) -> None:
    subjects = {each.__module__.rpartition(".")[2] for each in CONTRACTS.values()}
    found = {
        name
        for subject, module in files(f"{KERNELS}.{folder}").items()
        for name, value in vars(module).items()
        if subject in subjects and inspect.isfunction(value) and value.__module__ == module.__name__
    }
    assert {name for name in found if not name.startswith("_")} == twins(folder).keys()


def test_a_contract_keeps_its_name_its_words_and_its_signature() -> None:
    assert topk_indices.__module__ == "gradwire.kernels.topk"
    for each in CONTRACTS.values():
        assert (each.__name__, each.__doc__) == (each.plain.__name__, each.plain.__doc__)
        assert inspect.signature(each) == inspect.signature(each.plain)


def test_tensors_without_memory_go_to_the_contract() -> None:
    # Tensors on "meta" have a shape and no memory: a kernel for the CPU could not read them.
    x, indices = torch.empty(5, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    assert take(x, indices).device.type == "meta"
    assert pack_upper(x, 18, left=False).device.type == "meta"
    assert topk_indices(x, 2).device.type == "meta"


METHODS = sorted((ROOT / "src/gradwire/contrib").glob("*.py"))
WITHOUT_A_PLAN = {"mask_zeros"}
"""A memory's update knows no exchange."""


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_method_of_a_paper_takes_its_kernels_from_the_plan(path: Path) -> None:
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & CONTRACTS.keys() - WITHOUT_A_PLAN


CONTRACT = """
from collections.abc import Sequence
import torch
from torch import Tensor
from gradwire.kernels.dispatch import contract

def _is_positive(number, x, *, times=1):
    if number <= 0:
        raise ValueError("not positive")

@contract(_is_positive)
def named(number: int, x: {annotation}, *, times: int = 1) -> object:
    return "the contract", number, times
"""
TWIN = """
from gradwire.kernels.dispatch import takes
import torch
asked = []

{takes}
def named(number, x, *, times=1):
    asked.append(number)
    return ("{folder}", number, times) if number in {numbers} else NotImplemented
"""


class There(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True
    is_cpu = False


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a contract that says in some way that it takes a tensor, and twins by the text of their files."""

    def contract(annotation: str, **twins: str) -> Callable[..., Any]:
        package = tmp_path / "made"
        for folder, text in twins.items():
            (package / folder).mkdir(parents=True)
            (package / folder / "__init__.py").touch()
            (package / folder / "subject.py").write_text(text)
        (package / "__init__.py").touch()
        (package / "subject.py").write_text(CONTRACT.format(annotation=annotation))
        found: Callable[..., Any] = import_module("made.subject").named
        return found

    monkeypatch.syspath_prepend(tmp_path)
    # Triton is there, and launches what it is given.
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__spec__=object()))
    monkeypatch.setitem(sys.modules, "gradwire.kernels.device.trial", Mock())
    dispatch.forget()
    yield contract
    dispatch.forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "made"]:
        del sys.modules[name]


@pytest.fixture(params=["Tensor", "torch.Tensor", "'torch.Tensor'", "Sequence[torch.Tensor]", "object"])
def made(request: pytest.FixtureRequest, make: Callable[..., Any]) -> Callable[..., Any]:
    """A contract, and twins that take some numbers."""
    cpu = TWIN.format(folder="cpu", takes="@takes(torch.float32, torch.float64)", numbers="(-1, 1, 2, 3)")
    device = TWIN.format(folder="device", takes="", numbers="(1, 2)")
    found: Callable[..., Any] = make(request.param, cpu=cpu, device=device)
    return found


FLOATS = [(torch.float32, "cpu"), (torch.float64, "cpu"), (torch.float16, "the contract")]


def test_a_call_is_computed_by_the_twin_that_takes_its_tensors(made: Callable[..., Any]) -> None:
    for dtype, computes in FLOATS:
        here, there = torch.zeros(2, dtype=dtype), There(torch.zeros(2, dtype=dtype))
        assert made(3, here, times=3) == made(3, times=3, x=here) == (computes, 3, 3)
        assert made(3, [here, here])[0] == computes
        assert made(3, [here, there])[0] == "the contract"
        assert made(3, torch.zeros(4, dtype=dtype)[::2])[0] == "the contract"
        for x in (there, [there], (there, here)):
            assert made(2, x) == made(number=2, x=x) == ("device", 2, 1)
        assert made(3, there, times=4) == ("the contract", 3, 4)
    assert made(3, torch.tensor([1]))[0] == made(3, [])[0] == "cpu"


def test_a_plan_chooses_by_device_and_type(made: Callable[..., Any]) -> None:
    here, there, nowhere = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
    for dtype, computes in FLOATS:
        kernels = Kernels(here, dtype)
        chosen = kernels[made]
        assert chosen(3, torch.zeros(2, dtype=dtype), times=3) == (computes, 3, 3)
        assert kernels[made] is chosen
        assert Kernels(nowhere, dtype)[made](3, torch.zeros(2, dtype=dtype))[0] == "the contract"
        on_device, x = Kernels(there, dtype)[made], There(torch.zeros(2, dtype=dtype))
        assert [on_device(number, x)[0] for number in (2, 3)] == ["device", "the contract"]
        assert kernels.of(torch.float64)[made](3, torch.zeros(2).double())[0] == "cpu"
    assert Kernels()[made] is Kernels().of(torch.float64)[made] is made


def test_a_check_stands_in_front_of_every_twin(made: Callable[..., Any]) -> None:
    for x in (torch.zeros(2), There(torch.zeros(2))):
        with pytest.raises(ValueError, match="not positive"):
            made(0, x)
        with pytest.raises(ValueError, match="not positive"):
            made(0, x, times=2)
    assert "made.cpu.subject" not in sys.modules
    made(3, torch.zeros(2))
    assert sys.modules["made.cpu.subject"].asked == [3]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_a_plan_has_chosen_is_checked_if_a_variable_says_so(
    made: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(2) if device == "cpu" else There(torch.zeros(2))
    monkeypatch.setenv("GRADWIRE_CHECK_KERNELS", "1")
    checked = Kernels(torch.device(device), torch.float32)[made]
    assert checked(2, x)[0] != "the contract"
    with pytest.raises(ValueError, match="not positive"):
        checked(0, x)
    if device == "cpu":
        for other in (torch.zeros(4)[::2], torch.zeros(2).half(), torch.zeros(2, device="meta")):
            with pytest.raises(TypeError, match="named was chosen for other tensors"):
                checked(2, other)
    monkeypatch.setenv("GRADWIRE_CHECK_KERNELS", "0")
    assert Kernels(torch.device(device), torch.float32)[made](-1, x)[1] == -1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ModuleNotFoundError('missing', name='numba')", None),
        ("ModuleNotFoundError('missing', name='llvmlite')", "missing"),
        ("ImportError('Numba needs an older NumPy')", "Numba needs an older NumPy"),
    ],
)
def test_plain_torch_stands_in_for_a_numba_that_is_missing_and_not_for_a_broken_one(
    make: Callable[..., Any], error: str, said: str | None
) -> None:
    """A broken one may work on other ranks, which would have other bits."""
    named = make("Tensor", cpu=f"raise {error}")

    def planned(*given: object) -> object:
        return Kernels(torch.device("cpu"), torch.float32)[named](*given)

    for call in (named, planned):
        if said is None:
            assert call(3, torch.zeros(2)) == ("the contract", 3, 1)
        else:
            with pytest.raises(ImportError, match=f"^{said}$"):
                call(3, torch.zeros(2))


IMPORTED = """
import sys
from importlib import import_module
from pkgutil import iter_modules

from gradwire import kernels

for each in iter_modules(kernels.__path__):
    if each.name not in ("frames", "huffman"):  # which have one implementation
        import_module("gradwire.kernels." + each.name)
print([name for name in ("numba", "triton") if name in sys.modules])
"""


@pytest.mark.rest
def test_importing_contracts_loads_no_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
