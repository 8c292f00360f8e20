"""Elements at given indices, and the indices as bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.kernels.dispatch import is_fast, is_native


def take(x: Tensor, indices: Tensor, weight: float = 1.0) -> Tensor:
    """weight · x[indices] (k,), leaving zeros in x (n,) where it was taken.

    `indices` (k,) are int32 or int64 within 0 … n - 1; they are not checked again here.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> take(x, torch.tensor([0, 2]), 0.5), x
    (tensor([0.5000, 1.5000]), tensor([0., 2., 0.]))
    """
    if not (is_fast(x) and indices.is_contiguous()):
        return reference.take(x, indices.long(), weight)
    values = torch.empty(indices.numel(), dtype=x.dtype)
    cpu.take(x.numpy(), indices.numpy(), np.float32(weight), values.numpy())
    return values


def put(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Make `out` (n,) zero but for out[indices] = values (k,); indices as for `take`.

    >>> import torch
    >>> out = torch.ones(3)
    >>> put(out, torch.tensor([1]), torch.tensor([5.0]))
    >>> out
    tensor([0., 5., 0.])
    """
    out.zero_()
    scatter(out, indices, values)


def scatter(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out[indices] = values (k,), the rest of `out` (n,) as it was; indices as for `take`.

    >>> import torch
    >>> out = torch.ones(3)
    >>> scatter(out, torch.tensor([1]), torch.tensor([5.0]))
    >>> out
    tensor([1., 5., 1.])
    """
    if not (is_fast(out, values) and indices.is_contiguous()):
        out[indices.long()] = values
        return
    cpu.scatter(out.numpy(), indices.numpy(), values.numpy())


def add_at(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    """out[indices] += weight · values (k,), in the type of `out` (n,); indices as for `take`.

    >>> import torch
    >>> out = torch.ones(3)
    >>> add_at(out, torch.tensor([1, 2]), torch.tensor([5.0, 6.0]), 0.5)
    >>> out
    tensor([1.0000, 3.5000, 4.0000])
    """
    if not (is_fast(out, values) and indices.is_contiguous()):
        reference.add_at(out, indices.long(), values, weight)
        return
    cpu.add_at(out.numpy(), indices.numpy(), values.numpy(), np.float32(weight))


def pack_bits(indices: Tensor, words: int) -> Tensor:
    """A bitmap (words,) int32 with a one for each of `indices` (k,), lowest bit first; unchecked.

    >>> import torch
    >>> pack_bits(torch.tensor([0, 2, 33]), 2)
    tensor([5, 2], dtype=torch.int32)
    """
    if not is_native(indices):
        return reference.pack_bits(indices, words)
    packed = torch.zeros(words, dtype=torch.int32)
    cpu.pack_bits(indices.numpy(), packed.numpy())
    return packed


def index_type(numel: int) -> torch.dtype:
    """The narrower of int32 and int64 that holds every index below `numel`.

    >>> index_type(2**31), index_type(2**31 + 1)
    (torch.int32, torch.int64)
    """
    return torch.int32 if numel <= 2**31 else torch.int64


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The ones of a bitmap as ascending indices: `count` of them, or `count` + 1 if there are more.

    int32 where the bitmap has up to 2^31 bits, else int64.

    >>> unpack_bits(pack_bits(torch.tensor([0, 2, 33]), 2), 3)
    tensor([ 0,  2, 33], dtype=torch.int32)
    """
    dtype = index_type(32 * packed.numel())
    if not is_native(packed):
        return reference.unpack_bits(packed, count).to(dtype)
    indices = torch.empty(count + 1, dtype=dtype)
    return indices[: cpu.unpack_bits(packed.numpy(), indices.numpy())]
