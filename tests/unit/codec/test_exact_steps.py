"""Exact steps: every bit arrives, near the entropy, and nothing else decodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.codec.exact_steps import Layout, StepsKey, decode_steps, digest_of, encode_steps, largest_steps
from gradwire.errors import WireError
from gradwire.kernels.frames import checksum
from gradwire.kernels.ulps import changes_of
from tests.support.looped import looped

KEY = StepsKey(module=3, world=4, base=99)


def pair(numel: int, move: float, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Weights before and after a step of `move`, in the mean."""
    random = torch.Generator().manual_seed(numel)
    old = torch.randn(numel, generator=random) * 0.02
    return old.to(dtype), (old + move * torch.randn(numel, generator=random)).to(dtype)


def floor_bits(old: Tensor, new: Tensor) -> float:
    """The entropy of the changes, given exponents of old numbers in bfloat16."""
    exponents = old.view(torch.int16).long() >> 7 & 255
    joint = exponents << 16 | changes_of(new.view(torch.int16), old.view(torch.int16))
    counts = torch.unique(joint, return_counts=True)[1].double()
    of_class = torch.unique(exponents, return_counts=True)[1].double()
    return float((of_class * of_class.log2()).sum() - (counts * counts.log2()).sum())


@looped("layout", ["raw", "runs", "widths", "states"])
@looped("dtype", [torch.bfloat16, torch.float16])
@looped("numel", [0, 1, 2, 7, 127, 1000, 4097])
def test_every_bit_arrives(layout: Layout, dtype: torch.dtype, numel: int) -> None:
    for move in (0.0, 1e-5, 1e-3, 10.0):
        old, new = pair(numel, move, dtype)
        if move:
            odd = torch.tensor([torch.nan, -0.0, torch.inf, 1e-7])
            new[::50] = odd.repeat(numel)[: len(new[::50])].to(dtype)
        data = encode_steps(new, old, KEY, layout)
        assert data.numel() <= largest_steps(numel)
        assert data.numel() % 8 == 0
        held = old.clone()
        decode_steps(data, held, KEY)
        assert torch.equal(held.view(torch.int16), new.view(torch.int16))


@looped(("move", "most"), [(1e-6, 1.2), (1e-5, 1.13), (1e-4, 1.1), (1e-3, 1.1)])
def test_states_and_runs_are_near_the_entropy_and_widths_a_bit_above(move: float, most: float) -> None:
    numel = 100_000
    old, new = pair(numel, move)
    floor = floor_bits(old, new)
    states = 8 * encode_steps(new, old, KEY, "states").numel()
    assert states <= 1.03 * floor + 8 * (80 + 16 * 30)  # tables take about 30 bytes a class here
    assert states == 8 * encode_steps(new, old, KEY).numel()
    assert 8 * encode_steps(new, old, KEY, "runs").numel() <= most * floor + 8 * 80
    assert 8 * encode_steps(new, old, KEY, "widths").numel() <= 1.05 * floor + 1.5 * numel


def test_one_number_that_is_not_finite_costs_little() -> None:
    old, new = pair(100_000, 1e-5)
    before = encode_steps(new, old, KEY).numel()
    old[7], new[7], new[9] = torch.inf, torch.inf, torch.nan
    assert encode_steps(new, old, KEY).numel() <= before + 16


@looped(("numel", "move"), [(300, 1e-4), (100_000, 1e-9), (100_000, 1e-4)])
def test_the_shorter_one_of_states_and_runs_is_taken(numel: int, move: float) -> None:
    old, new = pair(numel, move)
    lengths = [encode_steps(new, old, KEY, layout).numel() for layout in ("states", "runs")]
    assert encode_steps(new, old, KEY).numel() == min(lengths)


def test_what_has_no_likeness_to_what_was_is_sent_as_it_is() -> None:
    old, _ = pair(1000, 0.0)
    new = torch.randint(-(1 << 15), 1 << 15, (1000,)).to(torch.int16).view(torch.bfloat16)
    assert encode_steps(new, old, KEY).numel() == largest_steps(1000)


@looped("layout", ["raw", "runs", "widths", "states"])
def test_a_frame_of_another_key_size_or_type_is_refused_and_nothing_changes(layout: Layout) -> None:
    old, new = pair(1000, 1e-4)
    data = encode_steps(new, old, KEY, layout)
    wrong = [
        (data, old, replace(KEY, **{name: 5})) for name in ("module", "world", "base")
    ] + [
        (data, old[:-1], KEY),
        (data, old.half(), KEY),
        (data[:-8], old, KEY),
        (data[:40], old, KEY),
        (torch.cat([data, data.new_zeros(8)]), old, KEY),
        (data.float(), old, KEY),
    ]  # fmt: skip
    for damaged, held, key in wrong:
        out = held.clone()
        with pytest.raises(WireError):
            decode_steps(damaged, out, key)
        assert torch.equal(out, held)


@looped("layout", ["raw", "runs", "widths", "states"])
def test_a_flipped_bit_anywhere_is_noticed_before_anything_changes(layout: Layout) -> None:
    old, new = pair(300, 1e-4)
    data = encode_steps(new, old, KEY, layout)
    for at in range(data.numel()):
        damaged, held = data.clone(), old.clone()
        damaged[at] ^= 1 << at % 8
        with pytest.raises(WireError):
            decode_steps(damaged, held, KEY)
        assert torch.equal(held, old)


@looped("layout", ["runs", "widths", "states"])
def test_a_frame_for_other_old_numbers_under_their_name_is_told(layout: Layout) -> None:
    old, new = pair(5000, 1e-4)
    data = encode_steps(new, old, KEY, layout)
    with pytest.raises(WireError, match="does not decode"):
        decode_steps(data, (old.float() * 3).bfloat16(), KEY)
    data[56] ^= 1
    data.numpy().view(np.uint64)[-1] = checksum(data[:-8])
    with pytest.raises(WireError, match="does not decode"):
        decode_steps(data, old.clone(), KEY)


def test_filling_that_is_not_zero_is_told() -> None:
    old, new = pair(7, 1.0)
    data = encode_steps(new, old, KEY, "raw")
    data[-9] = 1
    data.numpy().view(np.uint64)[-1] = checksum(data[:-8])
    with pytest.raises(WireError, match="does not decode"):
        decode_steps(data, old, KEY)


def test_keys_that_do_not_fit_and_numbers_of_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="module=-1"):
        StepsKey(module=-1, world=1, base=0)
    with pytest.raises(ValueError, match="float32"):
        encode_steps(torch.zeros(4), torch.zeros(4), KEY)


def test_a_digest_tells_other_numbers() -> None:
    old, _ = pair(1000, 0.0)
    other = old.clone()
    other[5] *= 2
    assert digest_of(old) != digest_of(other)
