"""Changes of 16-bit floats as fields: the kernel for devices against those of the CPU and the plain."""

from __future__ import annotations

import pytest
import torch

from gradwire.kernels.ulps import TILE, Halves
from tests.support.looped import looped
from tests.support.twins import cpu, plain
from tests.unit.kernels.test_ulps import MOVES, WIDTHS, pair

pytest.importorskip("triton", reason="kernels for devices need Triton")

from tests.device.there import device


@looped("numel", [1, TILE, 2 * TILE + 77])
@looped(("dtype", "halves"), [(torch.bfloat16, Halves(7, 121)), (torch.float16, Halves(10, 9))])
def test_what_is_decoded_is_what_the_cpu_decodes(numel: int, dtype: torch.dtype, halves: Halves) -> None:
    for move in MOVES:
        old, new = pair(numel, dtype, move)
        words = plain.pack_widths(new, old, halves, WIDTHS)
        for module in (device, cpu):
            out = old.clone()
            assert bool(module.add_widths(words, out, halves, WIDTHS))
            assert torch.equal(out, new)


@looped("numel", [1, 2 * TILE + 77])
@looped(("dtype", "halves"), [(torch.bfloat16, Halves(7, 121)), (torch.float16, Halves(10, 9))])
def test_what_is_counted_and_coded_is_what_the_contracts_say(
    numel: int, dtype: torch.dtype, halves: Halves
) -> None:
    for move in (*MOVES, 10.0):
        old, new = pair(numel, dtype, move)
        tally = device.tally_changes(new, old, halves.mantissa)
        assert torch.equal(tally, plain.tally_changes(new, old, halves.mantissa))
        words = device.pack_widths(new, old, halves, WIDTHS)
        assert torch.equal(words, plain.pack_widths(new, old, halves, WIDTHS))


def test_words_that_fit_no_numbers_are_told_and_nothing_outside_is_read_or_written() -> None:
    halves, random = Halves(7, 121), torch.Generator().manual_seed(3)
    old, new = pair(TILE + 40, torch.bfloat16, 1e-3)
    words = plain.pack_widths(new, old, halves, WIDTHS)
    told = 0
    for _ in range(60):
        damaged = words.clone()
        at = int(torch.randint(0, words.numel(), (), generator=random))
        damaged[at] ^= 1 << int(torch.randint(0, 31, (), generator=random))
        room = torch.zeros(TILE + 140, dtype=torch.int16)
        out = room[50:-50]
        out.copy_(old)
        sound = bool(device.add_widths(damaged, out, halves, WIDTHS))
        told += not sound
        assert not room[:50].any()
        assert not room[-50:].any()
        if not plain.add_widths(damaged, old.clone(), halves, WIDTHS):
            assert not sound or at >= 4 + int(words[2])  # places that do not ascend harm nobody
    assert told
    damaged = words.clone()
    damaged[2] += 1
    assert not device.add_widths(damaged, old.clone(), halves, WIDTHS)
