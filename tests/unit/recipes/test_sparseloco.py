"""SparseLoCo's algorithm in numpy, against the recipe over several steps; and what it sends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import gradwire
from gradwire.comm.threads import ThreadComm, run_ranks
from gradwire_lab.workloads.catalogue import workload
from tests.support.rig import Rig

Vector = NDArray[np.float32]
NUMEL, STEPS = 130 * 128, 5
"""Four chunks, and 256 elements of a fifth."""


def delta(rank: int, step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * step + rank))


def quantized(chosen: Vector) -> Vector:
    """±low or ±high for up to 64 values: the means of both halves of the range of their magnitudes."""
    size = np.abs(chosen)
    high = size > size.min() / 2 + size.max() / 2
    low_and_high = (
        size[~high].mean(dtype=np.float64),
        size[high].mean(dtype=np.float64) if high.any() else 0.0,
    )
    return (np.where(high, low_and_high[1], low_and_high[0]) * np.where(chosen < 0, -1, 1)).astype(np.float32)


def sent(e: Vector, chunk: int = 4096, keep: int = 64) -> Vector:
    """Q(Top-k(e)), chunk by chunk."""
    out = np.zeros_like(e)
    for start in range(0, len(e), chunk):
        places = start + np.sort(np.argsort(-np.abs(e[start : start + chunk]), kind="stable")[:keep])
        out[places] = quantized(e[places])
    return out


def oracle(world: int) -> tuple[list[Vector], list[Vector]]:
    """The mean of every step, and what every rank has left in the end."""
    left, means = [np.zeros(NUMEL, np.float32) for _ in range(world)], []
    for step in range(STEPS):
        total = np.zeros(NUMEL, np.float64)
        for rank in range(world):
            e = np.float32(0.95) * left[rank] + delta(rank, step).numpy()
            told = sent(e)
            left[rank], total = e - told, total + told
        means.append((total / world).astype(np.float32))
    return means, left


@pytest.mark.parametrize("world", [1, 2, 3])
def test_five_steps_are_those_of_the_paper(world: int) -> None:
    def rank(comm: ThreadComm) -> tuple[list[Tensor], Tensor]:
        rig = Rig(comm, "sparseloco", unit_elements=NUMEL, shapes={"weight": (130, 128)})
        steps = [rig.step({"weight": delta(comm.rank, step)}, [["weight"]]) for step in range(STEPS)]
        return [each.mean["weight"] for each in steps], rig.memory["weight"]

    means, left = oracle(world)
    # A few float32 roundings a step, of numbers up to about 10.
    close = {"rtol": 1e-6, "atol": 1e-5}
    for number, (found, unsent) in enumerate(run_ranks(world, rank)):
        for got, expected in zip(found, means, strict=True):
            np.testing.assert_allclose(got.numpy(), expected, **close)
        np.testing.assert_allclose(unsent.numpy(), left[number], **close)


@pytest.mark.parametrize("name", ["chargpt", "resnet_demo", "convnet"])
@pytest.mark.parametrize(("workers", "share"), [(2, 146), (4, 73)])
def test_a_whole_model_takes_no_more_than_the_published_format(name: str, workers: int, share: int) -> None:
    options = {"workers": workers, "rate_bit_per_s": 2e7, "step_s": 0.5}
    found = gradwire.plan(workload(name, full=False).model(0), candidates=["dense", "sparseloco"], **options)
    sizes = {each.recipe: each.wire_bytes for each in found.candidates}
    assert share * sizes["sparseloco"] <= sizes["dense"]


def test_more_than_a_chunk_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="keep=65 is outside 1 … chunk=64"):
        gradwire.recipes.recipe("sparseloco(keep=65, chunk=64)")
