"""The oracle against arithmetic that needs no oracle: examples worked by hand, and brute force."""

from __future__ import annotations

from itertools import combinations

import torch

from gradwire.kernels.compensation import Findings, compensate
from gradwire.kernels.draws import sample_indices
from gradwire.kernels.noise import splitmix64
from gradwire.kernels.topk import topk_indices
from tests.support.looped import looped

INF, NAN = float("inf"), float("nan")


@looped(
    ("values", "k", "kept"),
    [
        ([], 0, []),
        ([1.0], 0, []),
        ([1.0], 1, [0]),
        ([1.0, -3.0, 2.0], 1, [1]),
        ([1.0, -3.0, 2.0], 2, [1, 2]),
        ([2.0, -2.0, 2.0], 2, [0, 1]),  # ties: the lowest index
        ([0.0, -0.0, 0.0], 1, [0]),  # both zeros are equal
        ([1.0, NAN, 2.0], 1, [1]),
        ([1.0, -INF, 2.0], 1, [1]),
        ([INF, NAN], 1, [0]),  # NaN and Inf are equals
        ([NAN, -INF, 3.0], 2, [0, 1]),
        ([torch.finfo(torch.float32).max, INF], 1, [1]),  # Inf is above everything finite
        ([1e-45, 0.0, -1e-45], 2, [0, 2]),  # subnormals are not zero
    ],
)
def test_topk_by_hand(values: list[float], k: int, kept: list[int]) -> None:
    assert topk_indices.plain(torch.tensor(values), k).tolist() == kept


@looped("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_topk_knows_every_type(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -4.0, NAN, 3.0, INF], dtype=dtype)
    assert topk_indices.plain(x, 3).tolist() == [1, 2, 4]


def test_compensate_by_hand() -> None:
    working = torch.full((3,), NAN)
    flags = compensate.plain(working, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, -1.0]), 0.5, 2.0)
    assert working.tolist() == [0.5, 3.0, -0.5]
    assert flags == Findings((), True)


def test_compensate_widens_a_narrow_gradient_before_scaling() -> None:
    working = torch.empty(1)
    compensate.plain(working, torch.zeros(1), torch.tensor([60000.0], dtype=torch.float16), 1.0, 4.0)
    assert working.item() == 240000.0


def test_splitmix64_gives_the_published_numbers() -> None:
    # The first outputs from state 1234567 in Vigna's public test vectors.
    state, numbers = 1234567, []
    for _ in range(3):
        state, bits = splitmix64(state)
        numbers.append(bits)
    assert numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_samples_of_a_small_set_are_all_reached() -> None:
    drawn = {tuple(sample_indices.plain(5, 3, seed).tolist()) for seed in range(400)}
    assert drawn == set(combinations(range(5), 3))
