"""Ballots, tally and winners in plain torch: the oracle of the tests, and the fallback elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 64


def cast_votes(x: Tensor, sizes: Sequence[int], groups: int, rows: Tensor, means: Tensor) -> None:
    """See `gradwire.kernels.votes.cast_votes`."""
    bits, votes = _in_groups(x >= 0, sizes), _in_groups(x != 0, sizes).any(1, keepdim=True)
    room = (0, 0, 0, rows.shape[0] * groups - bits.shape[0])
    rows[:, :groups] = _packed(pad(bits, room)).view(rows.shape[0], groups)
    votes = pad(pad(votes, room).view(rows.shape[0], groups), (0, -groups % 64))
    rows[:, groups:] = _packed(votes.view(rows.shape[0], -1, 64))
    for number, part in enumerate(x.split_with_sizes(list(sizes))):
        means[number] = mean_magnitude(part)


def mean_magnitude(part: Tensor) -> Tensor:
    """In float64; of float64 relative to the largest, because the sum may overflow. 0 of nothing."""
    wide = part.abs().double()
    if part.numel() == 0 or not part.any():
        return wide.new_zeros(())
    if part.dtype != torch.float64:
        return wide.mean()
    return wide.max() * (wide / wide.max()).mean().clamp_max(1.0)


def tally(ballots: Tensor, groups: int) -> Tensor:
    """See `gradwire.kernels.votes.tally`."""
    ones = 2 * _bits(ballots[:, :groups]) - 1
    votes = _bits(ballots[:, groups:]).flatten(1)[:, :groups]
    sums = (ones * votes[:, :, None]).sum(0)
    return torch.stack([_packed(sums > 0), _packed(sums < 0)])


def apply_votes(results: Tensor, sizes: Sequence[int], levels: Tensor, out: Tensor) -> None:
    """See `gradwire.kernels.votes.apply_votes`."""
    bits = _bits(results.transpose(0, 1).flatten(1))
    signs, group = (bits[0] - bits[1]).to(out.dtype), 0
    for number, part in enumerate(out.split_with_sizes(list(sizes))):
        count = -(-part.numel() // GROUP)
        part.copy_(levels[number] * signs[group : group + count].view(-1)[: part.numel()])
        group += count


def _in_groups(flags: Tensor, sizes: Sequence[int]) -> Tensor:
    """(n,) as (groups, 64), every part filled up with False."""
    rows = [
        pad(part, (0, -part.numel() % GROUP)).view(-1, GROUP) for part in flags.split_with_sizes(list(sizes))
    ]
    return torch.cat([flags.new_zeros(0, GROUP), *rows])


def _packed(bits: Tensor) -> Tensor:
    """(n, 64) as (n,) int64, the lowest bit first."""
    # The sum wraps, as it should: the highest bit is the sign.
    return (bits.long() << torch.arange(64, device=bits.device)).sum(-1)


def _bits(words: Tensor) -> Tensor:
    """The inverse: (…, n) int64 as (…, n, 64)."""
    return (words[..., None] >> torch.arange(64, device=words.device)) & 1
