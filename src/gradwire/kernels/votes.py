"""Majority votes on signs: ballots, their tally, and the winning signs.

A *group* is up to 64 elements of one part; it votes or abstains as a whole. A *ballot* holds one word (int64)
of sign bits for each of its groups, then a bitmap, in words, of the groups that vote.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.dispatch import contract

GROUP = 64


def count_groups(sizes: Sequence[int]) -> int:
    """Number of groups of parts of `sizes` elements.

    >>> count_groups([64, 1, 0, 65])
    4
    """
    return sum(-(-size // GROUP) for size in sizes)


def ballot_words(groups: int) -> int:
    """int64 words of a ballot of `groups` groups.

    >>> ballot_words(64), ballot_words(65)
    (65, 67)
    """
    return groups + -(-groups // 64)


def _are_ballots(x: Tensor, sizes: Sequence[int], groups: int, rows: Tensor, means: Tensor) -> None:
    if x.shape != (sum(sizes),) or means.shape != (len(sizes),):
        raise ValueError(f"parts of {list(sizes)} do not fit {tuple(x.shape)} and {tuple(means.shape)} means")
    if rows.shape[1] != ballot_words(groups) or rows.shape[0] * groups < count_groups(sizes):
        raise ValueError(f"{tuple(rows.shape)} words are no ballots of {groups} groups for {list(sizes)}")


def _have_groups(ballots: Tensor, groups: int) -> None:
    if ballots.shape[1] < ballot_words(groups):
        raise ValueError(f"{tuple(ballots.shape)} words are no ballots of {groups} groups")


def _are_results(results: Tensor, sizes: Sequence[int], levels: Tensor, out: Tensor) -> None:
    if out.shape != (sum(sizes),) or levels.shape != (len(sizes),):
        raise ValueError(
            f"parts of {list(sizes)} do not fit {tuple(out.shape)} and {tuple(levels.shape)} levels"
        )
    if results.shape[1] != 2 or results.shape[0] * results.shape[2] < count_groups(sizes):
        raise ValueError(f"{tuple(results.shape)} words are no results for {list(sizes)}")


@contract(_are_ballots)
def cast_votes(x: Tensor, sizes: Sequence[int], groups: int, rows: Tensor, means: Tensor) -> None:
    """Write the ballots of x (n,), which consists of parts of `sizes` elements, and the mean magnitude of
    each part.

    Args:
        x: elements; an element votes with the bit x >= 0. A group of zeros abstains.
        sizes: elements of each part.
        groups: groups per ballot.
        rows: int64 (r, ballot_words(groups)), zeros before, written: ballot r holds groups r · groups to (r +
            1) · groups - 1.
        means: (parts,), written: mean |x| of each part.

    >>> rows, means = torch.zeros(1, 3, dtype=torch.int64), torch.empty(2)
    >>> cast_votes(torch.tensor([1.0, -2.0, 3.0, 0.0]), [3, 1], 2, rows, means)
    >>> rows, means
    (tensor([[5, 1, 1]]), tensor([2., 0.]))
    """
    bits, votes = _in_groups(x >= 0, sizes), _in_groups(x != 0, sizes).any(1, keepdim=True)
    room = (0, 0, 0, rows.shape[0] * groups - bits.shape[0])
    rows[:, :groups] = _packed(pad(bits, room)).view(rows.shape[0], groups)
    votes = pad(pad(votes, room).view(rows.shape[0], groups), (0, -groups % 64))
    rows[:, groups:] = _packed(votes.view(rows.shape[0], -1, 64))
    for number, part in enumerate(x.split_with_sizes(list(sizes))):
        means[number] = mean_magnitude(part)


@contract(_have_groups)
def tally(ballots: Tensor, groups: int) -> Tensor:
    """Count `ballots` (voters, ballot_words(groups)) int64; abstaining groups do not count.

    Returns (2, groups) int64: bits that have more ones than zeros, and bits that have fewer. Neither is set
    in a tie.

    >>> tally(torch.tensor([[3, 1], [1, 1], [-1, 0]]), 1)
    tensor([[ 1],
            [-4]])
    """
    ones = 2 * _bits(ballots[:, :groups]) - 1
    votes = _bits(ballots[:, groups:]).flatten(1)[:, :groups]
    sums = (ones * votes[:, :, None]).sum(0)
    return torch.stack([_packed(sums > 0), _packed(sums < 0)])


@contract(_are_results)
def apply_votes(results: Tensor, sizes: Sequence[int], levels: Tensor, out: Tensor) -> None:
    """Set out (n,) to ±levels[part]: plus where there were more ones, minus where there were fewer, 0 in
    ties.

    `results` (r, 2, groups) are the results of `tally` for consecutive groups. `levels` is (parts,).

    >>> out = torch.empty(4)
    >>> apply_votes(torch.tensor([[[1, 0], [2, 1]]]), [3, 1], torch.tensor([0.5, 4.0]), out)
    >>> out
    tensor([ 0.5000, -0.5000,  0.0000, -4.0000])
    """
    bits = _bits(results.transpose(0, 1).flatten(1))
    signs, group = (bits[0] - bits[1]).to(out.dtype), 0
    for number, part in enumerate(out.split_with_sizes(list(sizes))):
        count = -(-part.numel() // GROUP)
        part.copy_(levels[number] * signs[group : group + count].view(-1)[: part.numel()])
        group += count


def mean_magnitude(part: Tensor) -> Tensor:
    """Mean magnitude of `part`, float64 (); 0 if it is empty.

    For float64, magnitudes are divided by the largest first, because their sum may overflow.
    """
    wide = part.abs().double()
    if part.numel() == 0:
        return wide.new_zeros(())
    if part.dtype != torch.float64:
        return wide.mean()
    largest = wide.max()
    return torch.where(largest == 0.0, largest, largest * (wide / largest).mean().clamp_max(1.0))


def _in_groups(flags: Tensor, sizes: Sequence[int]) -> Tensor:
    """Reshape `flags` (n,) to (groups, 64); every part is padded with False."""
    rows = [
        pad(part, (0, -part.numel() % GROUP)).view(-1, GROUP) for part in flags.split_with_sizes(list(sizes))
    ]
    return torch.cat([flags.new_zeros(0, GROUP), *rows])


def _packed(bits: Tensor) -> Tensor:
    """Pack bits (…, 64) into int64 words (…,), the lowest bit first."""
    # The sum wraps, as it should: the highest bit is the sign.
    return (bits.long() << torch.arange(64, device=bits.device)).sum(-1)


def _bits(words: Tensor) -> Tensor:
    """Unpack int64 words (…, n) into bits (…, n, 64), the lowest first."""
    return (words[..., None] >> torch.arange(64, device=words.device)) & 1
