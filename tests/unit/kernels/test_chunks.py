"""The largest of each chunk against the reference, and the reference against brute force."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.kernels.chunks import chunk_topk_count, chunk_topk_indices, indices_near_maxima
from gradwire.kernels.topk import topk_indices
from tests.support.inputs import KINDS, normal
from tests.support.looped import looped

Kind = Callable[[int], Tensor]
SIZES = (0, 1, 2, 99, 100, 101, 4097, 40_009)
every_kind = looped("kind", KINDS)
every_size = looped("n", SIZES)


@every_kind
@every_size
def test_largest_of_each_chunk_are_those_of_the_reference(kind: Kind, n: int) -> None:
    x = kind(n)
    # One chunk, fewer than a tile of the kernel, several tiles, and more than there are elements.
    for chunks in (1, 2, 7, 401, 2051, 50_000):
        for keep in (1, 2, 9):
            fast = chunk_topk_indices(x, chunks, keep)
            assert torch.equal(fast, chunk_topk_indices.plain(x, chunks, keep)), (chunks, keep)


@every_kind
@looped(("chunks", "keep"), [(1, 3), (21, 1), (21, 4), (60, 4), (500, 3)])
def test_reference_is_top_k_chunk_by_chunk(kind: Kind, chunks: int, keep: int) -> None:
    x = kind(207)
    expected = sorted(
        first + chunks * index
        for first in range(min(chunks, 207))
        for index in topk_indices.plain(x[first::chunks], min(keep, len(x[first::chunks]))).tolist()
    )
    assert chunk_topk_indices.plain(x, chunks, keep).tolist() == expected
    assert chunk_topk_count(207, chunks, keep) == len(expected)


@every_kind
@every_size
def test_those_near_the_maxima_are_those_of_the_reference(kind: Kind, n: int) -> None:
    x = kind(n)
    for chunk in (1, 2, 7, 500, 50_000):
        for ahead in (x, 1.1 * x, 2 * x, 2 * x - x.flip(0), torch.zeros_like(x), 3 - x):
            fast = indices_near_maxima(x, ahead, chunk)
            assert torch.equal(fast, indices_near_maxima.plain(x, ahead, chunk)), chunk


@looped(
    ("values", "chosen"),
    [
        ([4.0, -2.0, 1.9, 0.0], [0, 1]),
        ([0.0, -0.0, 0.0, 0.0], []),
        ([torch.inf, torch.nan, 1e38, 0.0], [0, 1]),
        ([1e-45, 0.0, -1e-45, 4e-45], [3]),  # of the smallest subnormal 1, 0, 1 and 3
        ([1.0, 5.0, 2.0, 2.5, 1.0, 0.4], [1, 3, 4]),  # chunks of four
    ],
)
def test_near_the_maxima_by_hand(values: list[float], chosen: list[int]) -> None:
    x = torch.tensor(values)
    for found in (indices_near_maxima(x, 2 * x, 4), indices_near_maxima.plain(x, 2 * x, 4)):
        assert found.tolist() == chosen


@looped("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_and_strided_views_take_the_reference_path(dtype: torch.dtype) -> None:
    x = normal(2000)
    for view in (x.to(dtype), x[::2]):
        assert torch.equal(chunk_topk_indices(view, 100, 2), chunk_topk_indices.plain(view, 100, 2))
        near = indices_near_maxima(view, 2 * view, 100)
        assert torch.equal(near, indices_near_maxima.plain(view, 2 * view, 100))


def test_input_is_only_read() -> None:
    x = normal(4000)
    before = x.clone()
    chunk_topk_indices(x, 100, 1)
    chunk_topk_indices(x, 100, 3)
    indices_near_maxima(x, 2 * x, 100)
    assert torch.equal(x, before)


@looped(("chunks", "keep"), [(0, 1), (5, 0)])
def test_no_chunk_or_none_of_each_raises(chunks: int, keep: int) -> None:
    with pytest.raises(ValueError, match=f"chunks={chunks} and keep={keep} must be 1 or more"):
        chunk_topk_indices(normal(9), chunks, keep)


def test_no_chunk_or_another_size_raises() -> None:
    with pytest.raises(ValueError, match="chunk=0 must be 1 or more"):
        indices_near_maxima(normal(9), normal(9), 0)
    with pytest.raises(ValueError, match=r"torch.Size\(\[8\]\)"):
        indices_near_maxima(normal(9), normal(8), 4)
