"""More than 2^31 elements: indices do not wrap, and nearly empty memory stays nearly empty.

Memory is mapped, not filled: pages that are only read cost nothing, so that 8 GB of zeros fit anywhere.
"""

from __future__ import annotations

import mmap
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.codec.select.threshold import fill_up_from
from gradwire.kernels.chunks import indices_near_maxima
from gradwire.kernels.draws import sample_indices, stratified_indices
from gradwire.kernels.layouts import Blocks
from gradwire.kernels.places import add_at, pack_bits, scatter, take, unpack_bits
from gradwire.kernels.signs import pack_signs
from gradwire.kernels.threshold import indices_reaching
from gradwire.kernels.topk import topk_indices
from gradwire.kernels.votes import ballot_words, cast_votes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is mapped, not reserved")

N = 2**31 + 17
PLACES = torch.tensor([5, 2**31 - 1, 2**31, N - 1])
VALUES = torch.tensor([3.0, -4.0, 5.0, torch.inf])
MAY_GROW_BYTES = 2 * 10**9


@pytest.fixture(scope="module")
def zeros() -> Tensor:
    """(N,) zeros; every test leaves them as they were."""
    # Old Pythons do not name the last flag; this is its number on x86 and Arm.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, 4 * N, flags=flags), np.float32))


def peak_bytes() -> int:
    """The most memory that this process held since the mark was reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return 1024 * int(found[1])


@contextmanager
def little_memory() -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the mark
    before = peak_bytes()
    yield
    assert peak_bytes() - before < MAY_GROW_BYTES


@pytest.mark.rest
def test_chosen_taken_and_put_back_beyond_31_bits(zeros: Tensor) -> None:
    with little_memory():
        scatter(zeros, PLACES, VALUES)
        assert torch.equal(zeros[PLACES], VALUES)
        assert torch.equal(topk_indices(zeros, 4), PLACES)
        assert topk_indices(zeros, 6).tolist() == [0, 1, *PLACES.tolist()]  # zeros tie, the lowest win
        assert torch.equal(take(zeros, PLACES[1:3], 2.0), 2 * VALUES[1:3])
        assert topk_indices(zeros, 3).tolist() == [0, 5, N - 1]
        take(zeros, PLACES[[0, 3]])
        assert not zeros[PLACES].any()


@pytest.mark.rest
def test_signs_and_votes_beyond_31_bits(zeros: Tensor) -> None:
    blocks, groups = Blocks((N - 9, 9)), -(-(N - 9) // 64) + 1
    levels, packed = torch.empty(2, 1), torch.empty(blocks.bytes, dtype=torch.uint8)
    rows, means = torch.zeros(1, ballot_words(groups), dtype=torch.int64), torch.empty(2)
    with little_memory():
        scatter(zeros, PLACES[:3], VALUES[:3])
        pack_signs(zeros, blocks, levels, packed)
        cast_votes(zeros, blocks.sizes, groups, rows, means)
        take(zeros, PLACES)
    negative = int(PLACES[1])
    assert packed[negative // 8] == 0xFF - (1 << negative % 8)
    assert levels[0, 0] == means[0] == torch.tensor(12.0 / (N - 9))
    assert rows[0, negative // 64] == 2**63 - 1  # all ones but the highest
    assert rows[0, groups:].view(torch.uint8).count_nonzero() == 3


def test_bits_beyond_31_bits() -> None:
    with little_memory():
        packed = pack_bits(PLACES, -(-N // 32))
        found, _as_many = unpack_bits(packed, PLACES.numel())
        assert found.dtype == torch.int64
        assert torch.equal(found, PLACES)


def test_bits_of_exactly_31_are_int32() -> None:
    last = torch.tensor([2**31 - 1])
    found, _as_many = unpack_bits(pack_bits(last, 2**26), 1)
    assert found.dtype == torch.int32
    assert found.tolist() == last.tolist()


def test_draws_beyond_31_bits() -> None:
    with little_memory():
        drawn = sample_indices(N, 1000, 7)
        assert drawn.dtype == torch.int64
        assert (drawn.diff() > 0).all()
        assert 0 <= int(drawn[0]) <= int(drawn[-1]) < N
        # Of 1000 uniform draws from 0 … N - 1 the largest lies below 0.97 N once in 10^13.
        assert int(drawn[-1]) > 0.97 * N


def test_draws_equal_the_reference_beyond_31_bits() -> None:
    assert torch.equal(sample_indices(N, 50, 3), sample_indices.plain(N, 50, 3))


@pytest.mark.rest
def test_thresholds_and_chunks_beyond_31_bits(zeros: Tensor) -> None:
    with little_memory():
        add_at(zeros, PLACES, VALUES, 1.0)
        try:
            assert torch.equal(zeros[PLACES], VALUES)
            assert torch.equal(indices_reaching(zeros, 1.0, 10), PLACES)
            assert torch.equal(indices_near_maxima(zeros, zeros, 2**30), PLACES[[0, 1, 3]])
        finally:
            zeros[PLACES] = 0.0


def test_places_beyond_31_bits_are_filled_and_drawn() -> None:
    assert fill_up_from(2**31 + 4, PLACES, 6, N)[-3:].tolist() == [2**31 + 7, 2**31 + 8, N - 1]
    drawn = stratified_indices(N, 1000, 3)
    assert (drawn.diff() > 0).all()
    assert 2**31 - 2**23 < int(drawn[-1]) < N
