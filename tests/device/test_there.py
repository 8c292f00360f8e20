"""How kernel tests reach another device, tried from the CPU to the CPU; and poisoned memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.device.there import Carried, Poisoned, carried, memory_of

CPU = torch.device("cpu")


def test_memory_goes_as_a_whole_and_comes_back_with_every_byte() -> None:
    x = torch.arange(8.0)
    odd, first = x[1::2], x[:1]

    def shifted(parts: list[Tensor], factor: float) -> tuple[Tensor, int]:
        there, beside = parts
        assert there.data_ptr() != odd.data_ptr(), "not the tensor itself"
        assert there.stride() == (2,)
        assert there.data_ptr() == beside.data_ptr() + 4, "one memory, as at home"
        there.mul_(factor)
        memory_of(there)[8:12] = 0  # an element beside those that were given
        return there + 1, 3

    result, number = carried(shifted, CPU)([odd, first], 10.0)
    assert x.tolist() == [0.0, 10.0, 0.0, 30.0, 4.0, 50.0, 6.0, 70.0]
    assert (result.tolist(), number) == ([11.0, 31.0, 51.0, 71.0], 3)


def test_empty_tensors_and_other_values_go_along() -> None:
    def kept(x: Tensor, rows: tuple[int, ...], *, scale: float) -> Tensor:
        assert (rows, scale) == ((1, 2), 0.5)
        return x

    assert carried(kept, CPU)(torch.empty(0, 3), (1, 2), scale=0.5).shape == (0, 3)


@pytest.mark.parametrize("name", ["left_products", "right_products", "outer_products", "orthonormalise"])
def test_a_table_that_the_host_reads_stays_at_home(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    kernels = pytest.importorskip("gradwire.kernels.device.low_rank", reason="its kernels need Triton")
    monkeypatch.setattr(kernels, name, lambda *arguments: given.extend(arguments))
    tensors = [torch.ones(3), torch.zeros(2, 5, dtype=torch.int64), torch.ones(4)]
    getattr(Carried(CPU), name)(*tensors)
    assert [each is there for each, there in zip(tensors, given, strict=True)] == [False, True, False]


def test_uninitialised_memory_is_full_of_one_byte() -> None:
    with Poisoned():
        made = [
            torch.empty(3),
            torch.empty_like(torch.ones(2)),
            torch.ones(2).new_empty(4),
            torch.empty(2, 2).mT,
        ]
        zeros, drawn = torch.zeros(3), torch.randn(5)
    for each in made:
        assert (memory_of(each) == 0x7F).all()
    assert not zeros.any()
    assert drawn.abs().max() < 10
