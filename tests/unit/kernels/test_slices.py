"""Several threads give the bits of one, and are used only where cores are free."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from gradwire.environment import RANKS_HERE
from gradwire.kernels import slices
from gradwire.kernels.blocks import (
    add_blocks,
    average_shard,
    decode_shards,
    encode_blocks,
    encode_shards,
    sum_shard,
)
from gradwire.kernels.compensation import compensate, compensate_momentum
from gradwire.kernels.cpu import blocks as cpu_blocks
from gradwire.kernels.layouts import BlockKind, ScaledBlocks, ShardedBlocks
from gradwire.kernels.sketches import count_sketch, count_sketch_estimates
from gradwire_lab.emulate import ranks as launched
from tests.support.inputs import KINDS
from tests.support.looped import looped

BLOCK_KINDS: tuple[BlockKind, ...] = ("int8", "int4", "fp8")
UNEVEN = ([(40_009,)], [(5, 300, 0, 1031), (700,)], [(3,)] * 70, [(512,), (), (9, 9)])
"""Of each shard, the sizes of its parts."""


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads, for anything of 300 elements and more."""
    monkeypatch.setattr(slices, "free_threads", lambda: 3)
    monkeypatch.setattr(slices, "SMALLEST", 100)
    monkeypatch.setattr(cpu_blocks, "SMALLEST", 100)


@looped("kind", KINDS)
def test_slices_change_no_bit(kind, three: None) -> None:
    for n in (0, 1, 299, 300, 4097, 40_009):
        x, memory = kind(n), torch.arange(float(n))
        out, expected = torch.empty(n), torch.empty(n)
        assert compensate(out, memory, x, 0.5, 2.0) == compensate.plain(expected, memory, x, 0.5, 2.0)
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32)) or x.isnan().any()
        u_out, v_out = torch.empty(2, n)
        seen = compensate_momentum((v_out, u_out), (memory, memory), x, 0.9)
        assert seen == compensate_momentum.plain((out, expected), (memory, memory), x, 0.9)


def test_slices_of_a_sketch_read_their_own_elements(three: None) -> None:
    x, hashes = torch.randn(40_009), torch.tensor([[3 << 57, 5], [7 << 55, -11], [-9 << 54, 2]])
    table = count_sketch(x, hashes, 512)
    expected = count_sketch_estimates.plain(table, hashes, torch.empty_like(x))
    assert torch.equal(count_sketch_estimates(table, hashes, torch.empty_like(x)), expected)


@looped(("kind", "sizes"), [(kind, sizes) for kind in BLOCK_KINDS for sizes in UNEVEN])
def test_slices_of_blocks_change_no_bit(kind: BlockKind, sizes: list[tuple[int, ...]], three: None) -> None:
    table = ShardedBlocks(tuple(ScaledBlocks(each, 16, kind) for each in sizes))
    x = torch.randn(table.numel)
    left, expected_left = x.clone(), x.clone()
    rows, expected = (torch.full((len(sizes), table.row_bytes), 7, dtype=torch.uint8) for _ in range(2))
    encode_shards(left, table, rows)
    encode_shards.plain(expected_left, table, expected)
    assert torch.equal(rows, expected)
    assert torch.equal(left, expected_left)
    out, expected_out = torch.empty(2, table.numel)
    decode_shards(rows, table, out)
    decode_shards.plain(rows, table, expected_out)
    assert torch.equal(out, expected_out)
    for number, shard in enumerate(table.shards):
        x, (scales, codes) = torch.randn(shard.numel), table.split(rows[number], shard)
        given, expected = (
            table.split(torch.zeros(table.row_bytes, dtype=torch.uint8), shard) for _ in range(2)
        )
        left, expected_left = x.clone(), x.clone()
        encode_blocks(left, shard, *given, True)
        encode_blocks.plain(expected_left, shard, *expected, True)
        assert all(map(torch.equal, (*given, left), (*expected, expected_left)))
        out, expected_out = torch.ones(2, shard.numel)
        add_blocks(scales, codes, shard, out, 0.5)
        add_blocks.plain(scales, codes, shard, expected_out, 0.5)
        assert torch.equal(out, expected_out)
        several = rows[number].expand(3, -1).contiguous()
        out, expected_out = torch.ones(2, shard.numel)
        sum_shard(several, table, number, out, 0.25)
        sum_shard.plain(several, table, number, expected_out, 0.25)
        assert torch.equal(out, expected_out)


@looped(("kind", "sizes"), [(kind, sizes) for kind in BLOCK_KINDS for sizes in (*UNEVEN, [(), (0,), ()])])
def test_slices_of_means_change_no_bit(kind: BlockKind, sizes: list[tuple[int, ...]], three: None) -> None:
    table = ShardedBlocks(tuple(ScaledBlocks(each, 16, kind) for each in sizes))
    sent = torch.empty(len(sizes), len(sizes), table.row_bytes, dtype=torch.uint8)
    for rows in sent:
        encode_shards(torch.randn(table.numel), table, rows)
    for number, shard in enumerate(table.shards):
        unsent, expected = torch.ones(2, shard.numel)
        codes = [
            average(sent[:, number].clone(), table, number, torch.empty(shard.numel), left)
            for average, left in ((average_shard, unsent), (average_shard.plain, expected))
        ]
        assert torch.equal(*codes)
        assert torch.equal(unsent, expected)


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


def test_a_thread_has_torch_s_cores_too_where_a_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = []

    def work() -> None:
        slices.computes_elsewhere()
        found.append(slices.free_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (*found, slices.free_threads()) == (8, 1)


def test_an_emulated_network_says_how_many_ranks_there_are() -> None:
    assert launched.backend_variables({}, 0, 4, 1234, "wire")[RANKS_HERE] == "4"


def test_one_thread_where_nobody_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv(RANKS_HERE, raising=False)
    assert slices.free_threads() == 1
