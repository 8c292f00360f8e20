"""Changes of 16-bit floats, coded by the exponents of the old numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.kernels import ulps
from gradwire.kernels.ulps import (
    CLASSES,
    EVERY,
    NO_CHANGE,
    STATE_BITS,
    SYMBOLS,
    TILE,
    Halves,
    changes_of,
    classes_of,
    listed_symbols,
    shares_of,
    symbols_of,
)
from tests.support.looped import looped
from tests.support.twins import cpu, plain

MOVES = (0.0, 1e-6, 1e-4, 1.0)
RUNS = torch.tensor([2 << 4, 1 << 4 | 1, *[EVERY << 4 | i // 2 for i in range(13)], 0], dtype=torch.uint8)
WIDTHS = torch.tensor([1, 0, 2, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 14, 15, 16], dtype=torch.uint8)
TYPES = [(torch.bfloat16, Halves(7, 121)), (torch.float16, Halves(10, 9))]


def weights_of(new: Tensor, old: Tensor, halves: Halves) -> Tensor:
    """Weights of the symbols that occur: rare and frequent ones, and some that do not occur."""
    at = classes_of(old, halves) * SYMBOLS + symbols_of(changes_of(new, old))[0]
    counts = torch.bincount(at, minlength=CLASSES * SYMBOLS).view(CLASSES, SYMBOLS)
    return torch.where(counts > 0, (counts + 1).clamp(max=63), torch.zeros_like(counts)).to(torch.uint8)


def tables(new: Tensor, old: Tensor, halves: Halves) -> list[tuple[str, Tensor, Tensor]]:
    """Of each layout: its name, and what its codes are made with and read with."""
    weights = weights_of(new, old, halves)
    listed = torch.from_numpy(listed_symbols(weights.numpy()))
    return [("runs", RUNS, RUNS), ("widths", WIDTHS, WIDTHS), ("states", weights, listed)]


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
def test_all_layouts_bring_every_bit_and_twins_write_the_same(
    numel: int, dtype: torch.dtype, halves: Halves
) -> None:
    for move in MOVES:
        old, new = pair(numel, dtype, move)
        for name, given, table in tables(new, old, halves):
            words = getattr(plain, f"pack_{name}")(new, old, halves, given)
            assert torch.equal(words, getattr(cpu, f"pack_{name}")(new, old, halves, given)), name
            for module in (plain, cpu):
                out = old.clone()
                assert getattr(module, f"add_{name}")(words, out, halves, table) is True, name
                assert torch.equal(out, new), name


@looped(("dtype", "halves"), TYPES)
def test_changes_are_counted_by_exponent_and_symbol(dtype: torch.dtype, halves: Halves) -> None:
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


@looped("layout", [0, 1, 2])
def test_words_of_other_numbers_or_too_few_or_too_many_are_told(layout: int) -> None:
    halves = Halves(7, 121)
    old, new = pair(TILE + 500, torch.bfloat16, 1e-4)
    name, given, table = tables(new, old, halves)[layout]
    words = getattr(plain, f"pack_{name}")(new, old, halves, given)
    zeros = words.new_zeros(2)
    for module in (plain, cpu):
        add = getattr(module, f"add_{name}")
        for wrong in (words[:-2], torch.cat([words, zeros]), words[:2], words[:0]):
            assert add(wrong, old.clone(), halves, table) is False
        assert add(words, old[:-300].clone(), halves, table) is False


@looped("layout", [0, 1, 2])
def test_twins_take_the_same_damaged_words(layout: int) -> None:
    halves, random = Halves(7, 121), torch.Generator().manual_seed(1)
    old, new = pair(300, torch.bfloat16, 1e-4)
    name, given, table = tables(new, old, halves)[layout]
    words = getattr(plain, f"pack_{name}")(new, old, halves, given)
    for _ in range(200):
        damaged, of_it = words.clone(), table.clone()
        damaged[torch.randint(0, len(words), (2,), generator=random)] ^= 1 << int(
            torch.randint(0, 31, (), generator=random)
        )
        if torch.randint(0, 4, (), generator=random) == 0:
            of_it[torch.randint(0, 16, (), generator=random)] = int(
                torch.randint(0, 62, (), generator=random)
            )
        results = []
        for module in (plain, cpu):
            out = old.clone()
            results.append((getattr(module, f"add_{name}")(damaged, out, halves, of_it), out))
        assert results[0][0] == results[1][0]
        if results[0][0]:
            assert torch.equal(results[0][1], results[1][1])


def test_states_of_any_weights_are_shared_out_whole_and_code_what_has_weight() -> None:
    random, halves = torch.Generator().manual_seed(2), Halves(7, 121)
    old, new = pair(500, torch.bfloat16, 1e-3)
    occur = weights_of(new, old, halves) > 0
    for most in (1, 2, 63):
        weights = torch.randint(0, most + 1, (CLASSES, SYMBOLS), generator=random).to(torch.uint8)
        weights = torch.where(occur, weights.clamp(min=1), weights)
        shares = shares_of(weights.numpy())
        assert (shares.sum(1) == 1 << STATE_BITS).all()
        assert ((shares > 0) == (weights.numpy() > 0)).all()
        words = plain.pack_states(new, old, halves, weights)
        assert torch.equal(words, cpu.pack_states(new, old, halves, weights))
        table = torch.from_numpy(listed_symbols(weights.numpy()))
        for module in (plain, cpu):
            out = old.clone()
            assert module.add_states(words, out, halves, table) is True
            assert torch.equal(out, new)


def test_each_change_has_one_symbol_and_low_bits() -> None:
    change = torch.arange(1 << 16)
    symbols, spared = symbols_of(change)
    assert symbols[:8].tolist() == [*range(8)]
    assert int(symbols.max()) == SYMBOLS - 1
    assert bool((symbols.diff() >= 0).all())
    low = change & (1 << spared) - 1
    assert len(torch.unique(symbols << 16 | low)) == 1 << 16
    assert torch.equal(torch.bincount(symbols), 1 << (torch.arange(SYMBOLS) // 4 - 1).clamp(min=0))


def test_what_a_kernel_would_read_outside_of_is_refused() -> None:
    old = torch.zeros(4, dtype=torch.int16)
    with pytest.raises(ValueError, match="do not fit"):
        ulps.pack_runs(old[:3], old, Halves(7, 0), RUNS)
    with pytest.raises(ValueError, match="table"):
        ulps.pack_widths(old, old, Halves(7, 0), WIDTHS[:4])
    for weights in (torch.zeros(16, 59).byte(), torch.full((16, 60), 64).byte()):
        with pytest.raises(ValueError, match="weights"):
            ulps.pack_states(old, old, Halves(7, 0), weights)
    with pytest.raises(ValueError, match="mantissa"):
        ulps.tally_changes(old, old, 23)
