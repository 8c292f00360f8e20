"""take and put against their references."""

import torch

from gradwire.kernels.places import add_at, put, take
from tests.support.looped import looped


@looped("dtype", [torch.int32, torch.int64])
@looped("indices", [[], [0], [4, 1, 3], [0, 1, 2, 3, 4], [2, 2]])
def test_take_leaves_zeros_where_it_took(indices: list[int], dtype: torch.dtype) -> None:
    fast, slow = torch.arange(1.0, 6.0), torch.arange(1.0, 6.0)
    which = torch.tensor(indices, dtype=dtype)
    assert torch.equal(take(fast, which, 0.5), take.plain(slow, which.long(), 0.5))
    assert torch.equal(fast, slow)
    assert not fast[which.long()].any()


@looped("value_type", [torch.float32, torch.float64])
def test_put_overwrites_everything_else_with_zero(value_type: torch.dtype) -> None:
    out = torch.full((100,), torch.nan, dtype=value_type)
    put(out, torch.tensor([3, 99]), torch.tensor([1.0, -2.0], dtype=value_type))
    expected = torch.zeros(100, dtype=value_type)
    expected[3], expected[99] = 1.0, -2.0
    assert torch.equal(out, expected)


def test_take_on_a_strided_tensor_takes_the_reference_path() -> None:
    x = torch.arange(10.0)[::2]
    assert torch.equal(take(x, torch.tensor([1, 2])), torch.tensor([2.0, 4.0]))
    assert torch.equal(x, torch.tensor([0.0, 0.0, 0.0, 6.0, 8.0]))


@looped("dtype", [torch.int32, torch.int64])
@looped("value_type", [torch.float32, torch.float64])
def test_add_at_counts_an_index_as_often_as_it_occurs(dtype: torch.dtype, value_type: torch.dtype) -> None:
    out = torch.arange(6.0, dtype=value_type)
    add_at(out, torch.tensor([1, 5, 1], dtype=dtype), torch.tensor([2.0, 4.0, 8.0], dtype=value_type), 0.5)
    assert out.tolist() == [0.0, 6.0, 2.0, 3.0, 4.0, 7.0]


def test_add_at_takes_shorter_values_into_the_type_of_the_sum() -> None:
    out = torch.zeros(3)
    add_at(out, torch.tensor([2]), torch.tensor([1.5], dtype=torch.float16), -2.0)
    assert out.tolist() == [0.0, 0.0, -3.0]
