"""Ballots of signs, their tally, and the winners.

Vocabulary: a *group* is up to 64 elements of one part, and votes or abstains as a whole; a *ballot* is one
word of bits (int64) for each of a number of groups, then one bit for each group, in words, that says whether
it votes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference_votes
from gradwire.kernels.bit_blocks import Blocks
from gradwire.kernels.dispatch import is_fast
from gradwire.kernels.reference_votes import GROUP


def count_groups(sizes: Sequence[int]) -> int:
    """Groups of parts of `sizes` elements.

    >>> count_groups([64, 1, 0, 65])
    4
    """
    return sum(-(-size // GROUP) for size in sizes)


def ballot_words(groups: int) -> int:
    """Words of a ballot.

    >>> ballot_words(64), ballot_words(65)
    (65, 67)
    """
    return groups + -(-groups // 64)


def cast_votes(x: Tensor, sizes: Sequence[int], groups: int, rows: Tensor, means: Tensor) -> None:
    """Fill zeroed `rows` (r, ballot_words(groups)) int64, and `means` (parts,) with mean |x|.

    x (n,) are parts of `sizes` elements. Elements vote by x >= 0; a group of zeros abstains. Row r is the
    ballot of groups r · groups to (r + 1) · groups - 1.

    >>> import torch
    >>> rows, means = torch.zeros(1, 3, dtype=torch.int64), torch.empty(2)
    >>> cast_votes(torch.tensor([1.0, -2.0, 3.0, 0.0]), [3, 1], 2, rows, means)
    >>> rows, means
    (tensor([[5, 1, 1]]), tensor([2., 0.]))
    """
    blocks = Blocks(tuple(sizes))
    if x.shape != (blocks.numel,) or means.shape != (len(sizes),):
        raise ValueError(f"parts of {list(sizes)} do not fit {tuple(x.shape)} and {tuple(means.shape)} means")
    if rows.shape[1] != ballot_words(groups) or rows.shape[0] * groups < count_groups(sizes):
        raise ValueError(f"{tuple(rows.shape)} words are no ballots of {groups} groups for {list(sizes)}")
    if not (is_fast(x, means) and rows.is_contiguous()):
        reference_votes.cast_votes(x, sizes, groups, rows, means)
        return
    cpu.cast_votes(x.numpy(), blocks.bounds, groups, rows.numpy().view(np.uint64), means.numpy())


def tally(ballots: Tensor, groups: int) -> Tensor:
    """(2, groups) int64: the bits that have more ones than zeros among those who vote, and that have fewer.

    `ballots` (voters, ballot_words(groups)) int64. Bits of which neither is set are ties.

    >>> import torch
    >>> tally(torch.tensor([[3, 1], [1, 1], [-1, 0]]), 1)
    tensor([[ 1],
            [-4]])
    """
    if ballots.shape[1] < ballot_words(groups):
        raise ValueError(f"{tuple(ballots.shape)} words are no ballots of {groups} groups")
    if ballots.device.type != "cpu":
        return reference_votes.tally(ballots, groups)
    out = torch.empty(2, groups, dtype=torch.int64)
    cpu.tally(ballots.numpy().view(np.uint64), groups, out.numpy().view(np.uint64))
    return out


def apply_votes(results: Tensor, sizes: Sequence[int], levels: Tensor, out: Tensor) -> None:
    """out (n,) = levels[part] times 1 where there were more ones, -1 where fewer, 0 where neither.

    `results` (r, 2, groups) are what `tally` said of groups in a row; `levels` (parts,).

    >>> import torch
    >>> out = torch.empty(4)
    >>> apply_votes(torch.tensor([[[1, 0], [2, 1]]]), [3, 1], torch.tensor([0.5, 4.0]), out)
    >>> out
    tensor([ 0.5000, -0.5000,  0.0000, -4.0000])
    """
    blocks = Blocks(tuple(sizes))
    if out.shape != (blocks.numel,) or levels.shape != (len(sizes),):
        raise ValueError(
            f"parts of {list(sizes)} do not fit {tuple(out.shape)} and {tuple(levels.shape)} levels"
        )
    if results.shape[1] != 2 or results.shape[0] * results.shape[2] < count_groups(sizes):
        raise ValueError(f"{tuple(results.shape)} words are no results for {list(sizes)}")
    if not is_fast(out, levels):
        reference_votes.apply_votes(results, sizes, levels, out)
        return
    arrays = (results.numpy().view(np.uint64), blocks.bounds, levels.numpy())
    cpu.apply_votes(*arrays, out.numpy())
