"""Hot loops, each beside a plain-torch reference; callers need not know which one runs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels import cpu, reference, reference_elias_fano
from gradwire.kernels.chunks import chunk_topk_indices, indices_near_maxima
from gradwire.kernels.dispatch import is_fast
from gradwire.kernels.elias_fano import BLOCK, COUNTS, DECODING, ENCODING, ZEROS_BEFORE, Planes
from gradwire.kernels.threshold import Moments, indices_reaching, moments_reaching, stratified_indices

__all__ = [
    "Folded",
    "Moments",
    "Planes",
    "chunk_topk_indices",
    "count_sketch",
    "count_sketch_estimates",
    "feedback_topk",
    "fold",
    "fold_momentum",
    "index_type",
    "indices_near_maxima",
    "indices_reaching",
    "mask_zeros",
    "moments_reaching",
    "pack_bits",
    "pack_elias_fano",
    "prepare",
    "put",
    "sample_indices",
    "scatter",
    "stratified_indices",
    "take",
    "take_topk",
    "topk_indices",
    "unpack_bits",
    "unpack_elias_fano",
]


class Folded(NamedTuple):
    """What one fold saw."""

    any_gradient: bool
    """Whether any element of the gradient was non-zero."""
    finite: bool
    """Whether memory plus gradient is finite everywhere."""


def fold(working: Tensor, committed: Tensor, grad: Tensor, coefficient: float, scale: float = 1.0) -> Folded:
    """working = coefficient · committed + scale · grad in one pass; all three are (numel,).

    >>> import torch
    >>> working = torch.empty(2)
    >>> fold(working, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]), 0.5)
    Folded(any_gradient=True, finite=True)
    >>> working
    tensor([1., 1.])
    """
    if not working.shape == committed.shape == grad.shape:
        # The kernel checks no bounds: it would read beyond the shorter one.
        raise ValueError(f"shapes differ: {working.shape}, {committed.shape}, {grad.shape}")
    if not is_fast(working, committed, grad):
        return Folded(*reference.fold(working, committed, grad, coefficient, scale))
    arrays = (working.numpy(), committed.numpy(), grad.numpy())
    return Folded(*cpu.fold(*arrays, np.float32(coefficient), np.float32(scale)))


def fold_momentum(
    working: tuple[Tensor, Tensor],
    committed: tuple[Tensor, Tensor],
    grad: Tensor,
    momentum: float,
    scale: float = 1.0,
    *,
    nesterov: bool = False,
) -> Folded:
    """From (v, u), each (numel,), to u' = momentum · u + scale · grad and v' = v + u', in one pass.

    With `nesterov`, v' = v + momentum · u' + scale · grad (Lin et al. 2018, section 3, and appendix B).

    >>> import torch
    >>> v, u = torch.empty(1), torch.empty(1)
    >>> fold_momentum((v, u), (torch.tensor([5.0]), torch.tensor([2.0])), torch.tensor([1.0]), 0.5)
    Folded(any_gradient=True, finite=True)
    >>> v, u
    (tensor([7.]), tensor([2.]))
    """
    planes = (*working, *committed)
    if any(plane.shape != grad.shape for plane in planes):
        raise ValueError(f"shapes differ: {[tuple(plane.shape) for plane in planes]}, {tuple(grad.shape)}")
    if not is_fast(*planes, grad):
        return Folded(*reference.fold_momentum(working, committed, grad, momentum, scale, nesterov))
    v_out, u_out, v, u = (plane.numpy() for plane in planes)
    weights = np.float32(momentum), np.float32(scale)
    return Folded(*cpu.fold_momentum(v_out, u_out, v, u, grad.numpy(), *weights, nesterov))


def mask_zeros(target: Tensor, like: Tensor) -> None:
    """Make `target` (numel,) zero wherever `like` (numel,) is.

    >>> import torch
    >>> target = torch.ones(3)
    >>> mask_zeros(target, torch.tensor([1.0, 0.0, 2.0]))
    >>> target
    tensor([1., 0., 1.])
    """
    if not is_fast(target, like) or target.shape != like.shape:
        reference.mask_zeros(target, like)
        return
    cpu.mask_zeros(target.numpy(), like.numpy())


def topk_indices(x: Tensor, k: int) -> Tensor:
    """Indices (k,) int64, ascending, of the k largest magnitudes of x (n,); ties to the lowest index.

    >>> import torch
    >>> topk_indices(torch.tensor([1.0, -3.0, 2.0, 3.0]), 2)
    tensor([1, 3])
    """
    _check_count(k, x)
    if not is_fast(x):
        return reference.topk_indices(x, k)
    return torch.from_numpy(cpu.topk_indices(x.numpy(), k))


def take_topk(x: Tensor, k: int, weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """`topk_indices` and `take` in one: (indices (k,), weight · values (k,)), leaving zeros in x (n,).

    For whoever takes what it chose at once: values are read while the selection passes by them.

    >>> import torch
    >>> x = torch.tensor([1.0, -3.0, 2.0, 3.0])
    >>> take_topk(x, 2, 0.5), x
    ((tensor([1, 3]), tensor([-1.5000,  1.5000])), tensor([1., 0., 2., 0.]))
    """
    _check_count(k, x)
    if not is_fast(x):
        return reference.take_topk(x, k, weight)
    array = x.numpy()
    indices, values = cpu.take_topk(array, array[:0], k, np.float32(weight))
    return torch.from_numpy(indices), torch.from_numpy(values)


def feedback_topk(memory: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Error feedback and top-k in one pass: memory += grad, then `take_topk` of the sum; both are (n,).

    For whoever has the whole gradient at hand. Under DDP it arrives in buckets, and must be kept until the
    verdict: there `fold` and the selection are two jobs.

    >>> import torch
    >>> memory = torch.tensor([1.0, -3.0, 2.0])
    >>> feedback_topk(memory, torch.tensor([0.0, 2.0, 2.0]), 1), memory
    ((tensor([2]), tensor([4.])), tensor([ 1., -1.,  0.]))
    """
    if memory.shape != grad.shape:
        raise ValueError(f"shapes differ: {memory.shape}, {grad.shape}")
    _check_count(k, memory)
    if not is_fast(memory, grad):
        return reference.feedback_topk(memory, grad, k)
    indices, values = cpu.take_topk(memory.numpy(), grad.numpy(), k, np.float32(1.0))
    return torch.from_numpy(indices), torch.from_numpy(values)


def _check_count(k: int, x: Tensor) -> None:
    if not 0 <= k <= x.numel():
        raise ValueError(f"k={k} is outside 0 … {x.numel()}, the number of elements")


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


def pack_bits(indices: Tensor, words: int) -> Tensor:
    """A bitmap (words,) int32 with a one for each of `indices` (k,), lowest bit first; unchecked.

    >>> import torch
    >>> pack_bits(torch.tensor([0, 2, 33]), 2)
    tensor([5, 2], dtype=torch.int32)
    """
    if indices.device.type != "cpu":
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
    if packed.device.type != "cpu":
        return reference.unpack_bits(packed, count).to(dtype)
    indices = torch.empty(count + 1, dtype=dtype)
    return indices[: cpu.unpack_bits(packed.numpy(), indices.numpy())]


def count_sketch(x: Tensor, hashes: Tensor, columns: int) -> Tensor:
    """x (n,), float32 or float64, as a count sketch (rows, columns); sketches of several x add up.

    `hashes` (rows, 2) are int64 of any value: a multiplier and an addend per row.

    >>> import torch
    >>> x, hashes = torch.zeros(1000), torch.tensor([[3 << 57, 5], [7 << 55, 11], [9 << 54, 2]])
    >>> x[700] = 8.0
    >>> table = count_sketch(x, hashes, columns=4)
    >>> table.shape, table.abs().sum(1)
    (torch.Size([3, 4]), tensor([8., 8., 8.]))
    >>> count_sketch_estimates(table, hashes, torch.empty(1000))[700]
    tensor(8.)
    """
    if not (is_fast(x) and hashes.device.type == "cpu"):
        return reference.count_sketch(x, hashes, columns)
    table = torch.zeros(hashes.shape[0], columns)
    cpu.count_sketch(x.numpy(), *_unsigned(hashes), table.numpy())
    return table


def count_sketch_estimates(table: Tensor, hashes: Tensor, out: Tensor) -> Tensor:
    """Write to `out` (n,), and return, what a count sketch (rows, columns) says of the sketched elements.

    The median over an odd number of rows. NaN in the table counts as Inf, which has a place in the order.
    """
    if hashes.shape[0] % 2 == 0:
        raise ValueError(f"{hashes.shape[0]} rows have no middle one; take an odd number")
    table = table.nan_to_num(torch.inf, torch.inf, -torch.inf)
    if not (is_fast(table, out) and hashes.device.type == "cpu"):
        return out.copy_(reference.count_sketch_estimates(table, hashes, out.numel()))
    cpu.count_sketch_estimates(table.numpy(), *_unsigned(hashes), out.numpy())
    return out


def _unsigned(hashes: Tensor) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Multipliers and addends, each (rows,)."""
    multipliers, addends = hashes.t().contiguous().numpy().view(np.uint64)
    return multipliers, addends


def pack_elias_fano(indices: Tensor, planes: Planes) -> Tensor:
    """Ascending, distinct `indices` (count,) within 0 … numel - 1 as (words,) int32, laid out as `planes`.

    `ValueError` when they are out of order or range so that the kernel would write where it must not.

    >>> pack_elias_fano(torch.tensor([1, 20, 40]), Planes(count=3, numel=50, low_bits=3))
    tensor([409,  20,   4], dtype=torch.int32)
    """
    if indices.numel() != planes.count:
        raise ValueError(f"{indices.numel()} indices do not fit a layout for {planes.count}")
    if indices.device.type != "cpu":
        return reference_elias_fano.pack_elias_fano(indices, planes)
    words = np.zeros(planes.words + 1, np.uint32)
    row = np.zeros(planes.row // 64 + 2, np.uint64)
    low, groups, places = (words[start:] for start in planes.starts)
    if not cpu.elias_fano.split(indices.numpy(), planes.low_bits, low, row):
        raise ValueError(f"indices must ascend within 0 … {planes.numel - 1}, without repeats")
    cpu.elias_fano.encode_blocks(row, planes.blocks, ENCODING, groups, places)
    return torch.from_numpy(words[:-1].view(np.int32))


def unpack_elias_fano(packed: Tensor, planes: Planes) -> Tensor | None:
    """The indices (count,) that `pack_elias_fano` laid out as `planes`, or None where it cannot have done so.

    int32 if numel ≤ 2^31, else int64.

    >>> planes = Planes(count=3, numel=50, low_bits=3)
    >>> unpack_elias_fano(pack_elias_fano(torch.tensor([1, 20, 40]), planes), planes)
    tensor([ 1, 20, 40], dtype=torch.int32)
    """
    if packed.numel() != planes.words:
        raise ValueError(f"{packed.numel()} words do not fit a layout of {planes.words}")
    dtype = index_type(planes.numel)
    if packed.device.type != "cpu":
        found = reference_elias_fano.unpack_elias_fano(packed, planes)
        return None if found is None else found.to(dtype)
    # Kernels read two words at a time, and write a block's ones before they know how many there are.
    words = np.zeros(planes.words + 2, np.uint32)
    words[:-2] = packed.numpy().view(np.uint32)
    indices = torch.empty(planes.count + BLOCK, dtype=dtype)
    out = indices.numpy()
    low, groups, places = (words[start:] for start in planes.starts)
    tables = (DECODING, ZEROS_BEFORE, COUNTS)
    found = cpu.elias_fano.decode_blocks(groups, places, planes.blocks, planes.count, *tables, out)
    indices, out = indices[: planes.count], out[: planes.count]
    if found != planes.count or (found and not 0 <= out[-1] <= planes.top):
        return None
    if not cpu.elias_fano.join(low, planes.low_bits, out):
        return None
    return indices if found == 0 or 0 <= out[0] <= out[-1] < planes.numel else None


@lru_cache(maxsize=32)
def sample_indices(n: int, k: int, seed: int) -> Tensor:
    """k of n indices (k,) int64, ascending, uniformly without replacement; equal seeds give equal draws.

    Cached, because encoding and both decodings of a unit ask for the same draw: do not write into it.

    >>> sample_indices(10, 10, seed=1).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if not 0 <= k <= n:
        raise ValueError(f"k={k} is outside 0 … n={n}")
    return torch.from_numpy(cpu.sample_indices(n, k, seed))


def prepare() -> None:
    """Compile (or load from the cache) every kernel now: compilation holds the interpreter lock."""
    x = torch.zeros(64)
    fold(torch.empty_like(x), x, x, 1.0)
    fold_momentum((torch.empty_like(x), torch.empty_like(x)), (x, x), x, 0.9)
    mask_zeros(torch.empty_like(x), x)
    topk_indices(x, 16)
    take_topk(x, 16)
    feedback_topk(x, torch.zeros(64), 16)
    sample_indices(64, 8, 0)
    indices_reaching(x, 1.0, 16)
    moments_reaching(x, 1.0)
    stratified_indices(64, 8, 0)
    chunk_topk_indices(x, 64, 1)
    chunk_topk_indices(x, 64, 2)
    indices_near_maxima(x, 64, 2.0)
    hashes = torch.ones(1, 2, dtype=torch.int64)
    count_sketch_estimates(count_sketch(x, hashes, 2), hashes, torch.empty_like(x))
    for dtype in (torch.int32, torch.int64):
        indices = torch.arange(4, dtype=dtype)
        put(x, indices, take(x, indices))
        packed = pack_bits(indices, 1)
        cpu.unpack_bits(packed.numpy(), indices.numpy())
    for numel in (64, 2**40):
        planes = Planes(4, numel, 3 if numel == 64 else 32)
        for dtype in (torch.int32, torch.int64):
            unpack_elias_fano(pack_elias_fano(torch.arange(4, dtype=dtype), planes), planes)
