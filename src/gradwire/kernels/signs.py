"""One bit per element, with one level (±) or two levels per block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference_signs
from gradwire.kernels.bit_blocks import Blocks
from gradwire.kernels.dispatch import is_fast


def pack_signs(x: Tensor, blocks: Blocks, levels: Tensor, packed: Tensor, *, leave: bool = False) -> None:
    """Fill `packed` (blocks.bytes,) uint8 with bits of x >= 0, and `levels` with what they stand for.

    `levels` (blocks.count, 1) becomes the mean magnitude of each block, (blocks.count, 2) the means of its
    elements that are and are not >= 0. With `leave`, x (n,) is left with what the bits do not say.

    >>> import torch
    >>> x, levels, packed = torch.tensor([1.0, -2.0, 3.0]), torch.empty(1, 2), torch.empty(1).byte()
    >>> pack_signs(x, Blocks((3,)), levels, packed, leave=True)
    >>> levels, packed, x
    (tensor([[ 2., -2.]]), tensor([5], dtype=torch.uint8), tensor([-1.,  0.,  1.]))
    """
    _check(x, blocks, levels, packed)
    if not is_fast(x, levels):
        reference_signs.pack_signs(x, blocks, levels, packed, leave)
        return
    _pack(x, x[:0], blocks, levels, packed, leave)


def feedback_signs(memory: Tensor, grad: Tensor, blocks: Blocks, levels: Tensor, packed: Tensor) -> None:
    """Error feedback and `pack_signs` in one: memory += grad first, then it is left without what is packed.

    For whoever has the whole gradient at hand; under DDP `fold` and `pack_signs` are two jobs.

    >>> import torch
    >>> memory, levels, packed = torch.tensor([1.0, -2.0]), torch.empty(1, 1), torch.empty(1).byte()
    >>> feedback_signs(memory, torch.tensor([2.0, 1.0]), Blocks((2,)), levels, packed)
    >>> levels, packed, memory
    (tensor([[2.]]), tensor([1], dtype=torch.uint8), tensor([1., 1.]))
    """
    if memory.shape != grad.shape:
        raise ValueError(f"shapes differ: {memory.shape}, {grad.shape}")
    _check(memory, blocks, levels, packed)
    if not is_fast(memory, grad, levels):
        memory.add_(grad)
        reference_signs.pack_signs(memory, blocks, levels, packed, leave=True)
        return
    _pack(memory, grad, blocks, levels, packed, leave=True)


def _pack(x: Tensor, grad: Tensor, blocks: Blocks, levels: Tensor, packed: Tensor, leave: bool) -> None:
    arrays = (x.numpy(), grad.numpy(), blocks.bounds)
    cpu.pack_signs(*arrays, blocks.step, levels.numpy(), packed.numpy(), leave)


def add_signs(levels: Tensor, packed: Tensor, blocks: Blocks, out: Tensor, weight: float = 1.0) -> None:
    """out (n,) += weight · the level of each bit, as `pack_signs` has filled `levels` and `packed`.

    >>> import torch
    >>> out = torch.zeros(3)
    >>> add_signs(torch.tensor([[2.0]]), torch.tensor([5]).byte(), Blocks((3,)), out)
    >>> out
    tensor([ 2., -2.,  2.])
    """
    _check(out, blocks, levels, packed)
    if not is_fast(out, levels):
        reference_signs.add_signs(levels, packed, blocks, out, weight)
        return
    arrays = (levels.numpy(), packed.numpy(), blocks.bounds)
    cpu.add_signs(*arrays, blocks.step, out.numpy(), np.float32(weight))


def _check(x: Tensor, blocks: Blocks, levels: Tensor, packed: Tensor) -> None:
    """Kernels check no bounds."""
    if x.shape != (blocks.numel,) or packed.shape != (blocks.bytes,) or packed.dtype != torch.uint8:
        raise ValueError(f"{blocks} do not fit {tuple(x.shape)} elements and {tuple(packed.shape)} bytes")
    if levels.shape not in ((blocks.count, 1), (blocks.count, 2)) or not packed.is_contiguous():
        raise ValueError(f"{blocks} need levels (blocks, 1 or 2) and bytes in a row")
