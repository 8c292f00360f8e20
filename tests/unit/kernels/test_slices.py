"""Several threads give the bits of one, and are used only where cores are free."""

from __future__ import annotations

import os

import pytest
import torch

from gradwire.environment import RANKS_HERE
from gradwire.kernels import slices
from gradwire.kernels.folding import fold, fold_momentum
from gradwire.kernels.sketches import count_sketch, count_sketch_estimates
from gradwire.lab.emulate import ranks as launched
from tests.support.inputs import KINDS
from tests.support.looped import looped


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads, for anything of 300 elements and more."""
    monkeypatch.setattr(slices, "free_threads", lambda: 3)
    monkeypatch.setattr(slices, "SMALLEST", 100)


@looped("kind", KINDS)
def test_slices_change_no_bit(kind, three: None) -> None:
    for n in (0, 1, 299, 300, 4097, 40_009):
        x, memory = kind(n), torch.arange(float(n))
        out, expected = torch.empty(n), torch.empty(n)
        assert fold(out, memory, x, 0.5, 2.0) == fold.plain(expected, memory, x, 0.5, 2.0)
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32)) or x.isnan().any()
        u_out, v_out = torch.empty(2, n)
        seen = fold_momentum((v_out, u_out), (memory, memory), x, 0.9)
        assert seen == fold_momentum.plain((out, expected), (memory, memory), x, 0.9)


def test_slices_of_a_sketch_read_their_own_elements(three: None) -> None:
    x, hashes = torch.randn(40_009), torch.tensor([[3 << 57, 5], [7 << 55, -11], [-9 << 54, 2]])
    table = count_sketch(x, hashes, 512)
    expected = count_sketch_estimates.plain(table, hashes, torch.empty_like(x))
    assert torch.equal(count_sketch_estimates(table, hashes, torch.empty_like(x)), expected)


def test_slices_make_up_everything_in_order(three: None) -> None:
    assert slices.each_slice(1000, lambda here: (here.start, here.stop)) == [
        (0, 333),
        (333, 666),
        (666, 1000),
    ]
    assert slices.each_slice(100, lambda here: (here.start, here.stop)) == [(0, 100)]


@looped("failing", [0, 1, 2])
def test_an_error_in_any_slice_is_raised(failing: int, three: None) -> None:
    def work(here: slice) -> None:
        if here.start == 333 * failing:
            raise ArithmeticError(f"slice {failing}")

    with pytest.raises(ArithmeticError, match=f"slice {failing}"):
        slices.each_slice(1000, work)


@looped(
    ("cores", "ranks", "computing", "threads"),
    [(8, 1, 8, 1), (8, 2, 1, 4), (8, 4, 1, 2), (8, 8, 1, 1), (2, 4, 1, 1), (16, 1, 12, 4), (3, 1, 1, 3)],
)
def test_threads_are_the_cores_that_neither_ranks_nor_torch_use(
    cores: int, ranks: int, computing: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: computing)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert slices.free_threads() == threads
    monkeypatch.setenv(RANKS_HERE, str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert slices.free_threads() == threads


def test_an_emulated_network_says_how_many_ranks_there_are() -> None:
    assert launched.backend_variables({}, 0, 4, 1234, "wire")[RANKS_HERE] == "4"


def test_one_thread_where_nobody_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv(RANKS_HERE, raising=False)
    assert slices.free_threads() == 1
