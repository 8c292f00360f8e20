"""Contracts and their implementations: the same names and signatures, and checks in front of both."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels import cpu, reference
from gradwire.kernels.dispatch import DECLINED, Declined, checked, dispatched
from gradwire.kernels.subjects import CONTRACTS, SUBJECTS

IMPLEMENTED = [name for name in SUBJECTS if hasattr(cpu, name)]


def parameters(function: object) -> list[tuple[str, object, object, object]]:
    """Names, kinds, defaults and annotations."""
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]  # any callable
    return [(each.name, each.kind, each.default, each.annotation) for each in found]


def returned(function: Callable[..., object]) -> set[str]:
    """The types that a function says it returns."""
    return set(str(inspect.signature(function).return_annotation).split(" | "))


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_implementations_have_the_signatures_of_their_contracts(name: str) -> None:
    contract = getattr(reference, name)
    assert parameters(getattr(cpu, name)) == parameters(contract)
    assert parameters(getattr(kernels, name)) == parameters(contract)
    assert getattr(kernels, name).__doc__ == contract.__doc__
    assert returned(getattr(cpu, name)) - {"Declined"} == returned(contract)


def test_what_has_no_kernel_for_the_cpu_is_computed_by_its_contract() -> None:
    assert SUBJECTS.keys() - IMPLEMENTED == {"add_levels", "encode_levels", "poison", "zero_idle"}
    assert all(
        parameters(getattr(kernels, name)) == parameters(getattr(reference, name)) for name in SUBJECTS
    )


def test_no_file_has_the_name_of_a_contract() -> None:
    # The package would give the module where the function is asked for.
    assert not SUBJECTS.keys() & CONTRACTS.keys()


def test_every_name_of_the_package_is_found() -> None:
    assert SUBJECTS.keys() < set(kernels.__all__)
    assert all(getattr(kernels, name) is not None for name in kernels.__all__)
    with pytest.raises(AttributeError, match="no attribute 'taken'"):
        _ = kernels.taken
    with pytest.raises(AttributeError, match="no attribute 'taken'"):
        _ = cpu.taken


def test_what_is_declined_goes_to_the_contract_with_all_its_arguments() -> None:
    def contract(x: Tensor, *, times: int = 1) -> Tensor:
        return x * times

    def implementation(x: Tensor, *, times: int = 1) -> Tensor | Declined:
        return -x if x.dtype == torch.float32 else DECLINED

    both = dispatched(contract, implementation)
    assert both(torch.tensor([3.0])).item() == -3.0
    assert both(torch.tensor([3]), times=2).item() == 6


def test_a_check_stands_in_front_of_every_implementation() -> None:
    seen: list[int] = []

    def is_positive(n: int) -> None:
        if n <= 0:
            raise ValueError("not positive")

    @checked(is_positive)
    def contract(n: int) -> int:
        seen.append(n)
        return n

    def implementation(n: int) -> int | Declined:
        seen.append(n)
        return DECLINED

    both = dispatched(contract, implementation)
    with pytest.raises(ValueError, match="not positive"):
        both(0)
    assert seen == []
    assert both(2) == 2
    assert seen == [2, 2]


def test_tensors_of_another_device_go_to_the_reference() -> None:
    # Tensors on "meta" have a shape and no memory: a kernel for the CPU could not read them.
    x, indices = torch.empty(5, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    assert kernels.take(x, indices).device.type == "meta"
    assert kernels.pack_upper(x, 18, left=False).device.type == "meta"
    assert kernels.topk_indices(x, 2).device.type == "meta"
