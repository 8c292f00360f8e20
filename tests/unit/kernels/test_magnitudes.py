"""The histogram of magnitudes against its reference and against bins by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.magnitudes import BINS, magnitude_edges, magnitude_histogram
from tests.support.inputs import KINDS, normal
from tests.support.looped import looped

SIZES = (0, 1, 2, 3, 4, 5, 1000, 40_009)


@looped("draw", KINDS)
@looped("n", SIZES)
def test_counts_and_energies_are_those_of_the_reference(draw: Callable[[int], Tensor], n: int) -> None:
    x = draw(n)
    counts, energies = magnitude_histogram(x)
    expected_counts, expected_energies = magnitude_histogram.plain(x)
    assert torch.equal(counts, expected_counts)
    # n additions in float64 in another order, all of one sign: n·2^-52 relative.
    torch.testing.assert_close(energies, expected_energies, rtol=n * 2.0**-52, atol=0.0, equal_nan=True)


@looped("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_and_strides_are_binned_as_float32(dtype: torch.dtype) -> None:
    x = normal(1000).to(dtype)
    for each in (x, x[::3]):
        found, expected = magnitude_histogram(each), magnitude_histogram(each.float().contiguous())
        assert torch.equal(found.counts, expected.counts)
        torch.testing.assert_close(found.energies, expected.energies, rtol=1000 * 2.0**-52, atol=0.0)


def test_every_element_lies_between_the_edges_of_its_bin() -> None:
    edges = magnitude_edges()
    assert edges.numel() == BINS + 1
    assert (edges[1:] >= edges[:-1]).all()
    x = torch.cat([normal(500), 1e-41 * normal(20), 1e30 * normal(20), torch.tensor([0.0, 1.0, -1.0, 1.125])])
    for value in x:
        counts, _energies = magnitude_histogram(value.reshape(1))
        place = int(counts.nonzero())
        assert edges[place] <= value.abs().double() < edges[place + 1]


def test_bins_are_an_eighth_of_an_octave() -> None:
    edges = magnitude_edges()
    start = int((edges == 1.0).nonzero()[0])
    assert edges[start : start + 9].tolist() == [1 + i / 8 for i in range(9)]
