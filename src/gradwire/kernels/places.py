"""Elements at given indices, and the indices as bits."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract
from gradwire.kernels.payload import Sound


@contract()
def take(x: Tensor, indices: Tensor, weight: float = 1.0) -> Tensor:
    """Take weight · x[indices] (k,) out of x (n,), which becomes zero there.

    `indices` (k,) are int32 or int64 within 0 … n - 1; this is not checked.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> take(x, torch.tensor([0, 2]), 0.5), x
    (tensor([0.5000, 1.5000]), tensor([0., 2., 0.]))
    """
    places = indices.long()
    values = x[places] * weight
    x.index_fill_(0, places, 0.0)  # x[places] = 0.0 would upload the zero, and wait for it
    return values


@contract()
def scatter(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out[indices] = values (k,); other elements of `out` (n,) stay. Indices are as for `take`.

    >>> out = torch.ones(3)
    >>> scatter(out, torch.tensor([1]), torch.tensor([5.0]))
    >>> out
    tensor([1., 5., 1.])
    """
    out[indices.long()] = values


@contract()
def put(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Clear `out` (n,), then out[indices] = values (k,). Indices are as for `take`, and ascending.

    >>> out = torch.ones(3)
    >>> put(out, torch.tensor([1]), torch.tensor([5.0]))
    >>> out
    tensor([0., 5., 0.])
    """
    out.zero_()
    scatter.plain(out, indices, values)


@contract()
def add_at(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    """out[indices] += weight · values (k,), computed in the type of `out` (n,). Indices are as for `take`.

    >>> out = torch.ones(3)
    >>> add_at(out, torch.tensor([1, 2]), torch.tensor([5.0, 6.0]), 0.5)
    >>> out
    tensor([1.0000, 3.5000, 4.0000])
    """
    out.index_add_(0, indices.long(), values.to(out.dtype), alpha=weight)


@contract()
def pack_bits(indices: Tensor, words: int) -> Tensor:
    """Pack `indices` (k,) as a bitmap (words,) int32, lowest bit first. Indices are not checked.

    >>> pack_bits(torch.tensor([0, 2, 33]), 2)
    tensor([5, 2], dtype=torch.int32)
    """
    bits = torch.zeros(words * 32, dtype=torch.int64, device=indices.device)
    bits.index_fill_(0, indices.long(), 1)
    weights = 1 << torch.arange(32, device=indices.device)
    # The sum of a word's weights is below 2^32: its low 32 bits are the word.
    return (bits.view(words, 32) * weights).sum(1).to(torch.int32)


@contract()
def unpack_bits(packed: Tensor, count: int) -> tuple[Tensor, Sound]:
    """Indices (count,) of the first `count` ones of a bitmap, ascending; also whether it has exactly `count`
    ones.

    They are int32 if the bitmap has up to 2^31 bits, else int64. Missing ones get the index of the last bit.

    >>> unpack_bits(pack_bits(torch.tensor([0, 2, 33]), 2), 3)
    (tensor([ 0,  2, 33], dtype=torch.int32), True)
    """
    bits = (packed.view(-1, 1) >> torch.arange(32, device=packed.device)) & 1
    found, as_many = ones(bits.view(-1), count)
    return found.to(index_type(32 * packed.numel())), as_many


def ones(bits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places of the first `count` ones in `bits` (n,) int64, and whether there are exactly `count`.

    Missing ones get the last place. `nonzero` is avoided, because its size would be read on the host.

    >>> ones(torch.tensor([0, 1, 0, 1]), 1)
    (tensor([1]), tensor(False))
    """
    so_far = bits.cumsum(0)
    ranks = torch.arange(1, count + 1, device=bits.device)
    return torch.searchsorted(so_far, ranks).clamp(max=max(bits.numel() - 1, 0)), bits.sum() == count


def choice(indices: Tensor, sound: Sound, numel: int) -> tuple[Tensor, Sound]:
    """Check `indices` (count,): `sound`, ascending without repeats, within 0 … numel - 1.

    Returns (indices, whether they pass). Indices that fail are replaced by 0 … count - 1, so that later reads
    stay within bounds.
    """
    if indices.numel() == 0:
        return indices.to(index_type(numel)), sound
    wide = indices.long()  # as `numel` may be more than their own type holds
    sound = (wide.diff() > 0).all() & (wide[0] >= 0) & (wide[-1] < numel) & sound
    first = torch.arange(indices.numel(), device=indices.device)
    return torch.where(sound, indices, first).to(index_type(numel)), sound


def index_type(numel: int) -> torch.dtype:
    """The narrowest of int32 and int64 that holds every index below `numel`.

    >>> index_type(2**31), index_type(2**31 + 1)
    (torch.int32, torch.int64)
    """
    return torch.int32 if numel <= 2**31 else torch.int64
