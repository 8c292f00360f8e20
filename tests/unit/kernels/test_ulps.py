"""Changes of 16-bit floats, coded by the exponents of the old numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.kernels import ulps
from gradwire.kernels.ulps import EVERY, NO_CHANGE, TILE, Halves
from tests.support.looped import looped
from tests.support.twins import cpu, plain

MOVES = (0.0, 1e-6, 1e-4, 1.0)
RUNS = torch.tensor([2 << 4, 1 << 4 | 1, *[EVERY << 4 | i // 2 for i in range(13)], 0], dtype=torch.uint8)
WIDTHS = torch.tensor([1, 0, 2, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 14, 15, 16], dtype=torch.uint8)
TYPES = [(torch.bfloat16, Halves(7, 121)), (torch.float16, Halves(10, 9))]


def pair(numel: int, dtype: torch.dtype, move: float) -> tuple[Tensor, Tensor]:
    """Bits of weights before and after a step, with all that a float can be among them."""
    random = torch.Generator().manual_seed(numel)
    old = torch.randn(numel, generator=random) * 0.02
    new = old + move * torch.randn(numel, generator=random)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-7, -3e-39, 65504.0])
    if move:
        old[::97] = odd.repeat(numel)[: len(old[::97])]
        new[5::89] = odd.repeat(numel)[: len(new[5::89])]
    return old.to(dtype).view(torch.int16), new.to(dtype).view(torch.int16)


@looped("numel", [0, 1, 7, 129, TILE, TILE + 1])
@looped(("dtype", "halves"), TYPES)
def test_both_layouts_bring_every_bit_and_twins_write_the_same(
    numel: int, dtype: torch.dtype, halves: Halves
) -> None:
    for move in MOVES:
        old, new = pair(numel, dtype, move)
        for name, table in (("runs", RUNS), ("widths", WIDTHS)):
            words = getattr(plain, f"pack_{name}")(new, old, halves, table)
            assert torch.equal(words, getattr(cpu, f"pack_{name}")(new, old, halves, table)), name
            for module in (plain, cpu):
                out = old.clone()
                assert getattr(module, f"add_{name}")(words, out, halves, table) is True, name
                assert torch.equal(out, new), name


@looped(("dtype", "halves"), TYPES)
def test_changes_are_counted_by_exponent_and_bits(dtype: torch.dtype, halves: Halves) -> None:
    for move in MOVES:
        old, new = pair(3000, dtype, move)
        table = plain.tally_changes(new, old, halves.mantissa)
        assert torch.equal(table, cpu.tally_changes(new, old, halves.mantissa))
        assert table.sum() == 3000
        assert table[:, 0].sum() == (new == old).sum()


def test_all_changes_of_all_numbers_are_brought_back() -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for shift in (0, 1, 7, 1 << 12, (1 << 15) + 3):
        other = every.roll(shift)
        assert torch.equal(ulps.changed(every, ulps.changes_of(other, every)), other)


def test_a_class_without_changes_takes_no_bits() -> None:
    old, _ = pair(1000, torch.bfloat16, 0.0)
    table = torch.full((16,), NO_CHANGE << 4, dtype=torch.uint8)
    for module in (plain, cpu):
        assert module.pack_runs(old, old, Halves(7, 121), table).numel() == 0


@looped(("name", "table"), [("runs", RUNS), ("widths", WIDTHS)])
def test_words_of_other_numbers_or_too_few_or_too_many_are_told(name: str, table: Tensor) -> None:
    halves = Halves(7, 121)
    old, new = pair(TILE + 500, torch.bfloat16, 1e-4)
    words = getattr(plain, f"pack_{name}")(new, old, halves, table)
    zeros = words.new_zeros(2)
    for module in (plain, cpu):
        add = getattr(module, f"add_{name}")
        for wrong in (words[:-2], torch.cat([words, zeros]), words[:2], words[:0]):
            assert add(wrong, old.clone(), halves, table) is False
        assert add(words, old[:-300].clone(), halves, table) is False


@looped(("name", "table"), [("runs", RUNS), ("widths", WIDTHS)])
def test_twins_take_the_same_damaged_words(name: str, table: Tensor) -> None:
    halves, random = Halves(7, 121), torch.Generator().manual_seed(1)
    old, new = pair(300, torch.bfloat16, 1e-4)
    words = getattr(plain, f"pack_{name}")(new, old, halves, table)
    for _ in range(200):
        damaged = words.clone()
        damaged[torch.randint(0, len(words), (2,), generator=random)] ^= 1 << int(
            torch.randint(0, 31, (), generator=random)
        )
        results = []
        for module in (plain, cpu):
            out = old.clone()
            results.append((getattr(module, f"add_{name}")(damaged, out, halves, table), out))
        assert results[0][0] == results[1][0]
        if results[0][0]:
            assert torch.equal(results[0][1], results[1][1])


def test_what_a_kernel_would_read_outside_of_is_refused() -> None:
    old = torch.zeros(4, dtype=torch.int16)
    with pytest.raises(ValueError, match="do not fit"):
        ulps.pack_runs(old[:3], old, Halves(7, 0), RUNS)
    with pytest.raises(ValueError, match="table"):
        ulps.pack_widths(old, old, Halves(7, 0), WIDTHS[:4])
    with pytest.raises(ValueError, match="mantissa"):
        ulps.tally_changes(old, old, 23)
