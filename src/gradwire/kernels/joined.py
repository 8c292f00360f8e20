"""Several tensors as one flat tensor of float32, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract
from gradwire.kernels.flagged import mark_not_finite, require_mark


def _can_join(regions: list[Tensor], flat: Tensor, weight: float, mark: Tensor | None = None) -> None:
    require_mark(mark)
    numel = sum(each.numel() for each in regions) + (mark is not None)
    if flat.shape != (numel,) or flat.dtype != torch.float32:
        raise ValueError(f"{numel} float32 are due, but this is {tuple(flat.shape)} {flat.dtype}")


def _can_split(flat: Tensor, regions: list[Tensor], mark: Tensor | None = None) -> None:
    require_mark(mark)
    numel = sum(each.numel() for each in regions)
    if flat.dim() != 1 or flat.numel() < numel or flat.dtype != torch.float32:
        raise ValueError(f"{numel} float32 are due, but this is {tuple(flat.shape)} {flat.dtype}")


@contract(_can_join)
def join(regions: list[Tensor], flat: Tensor, weight: float, mark: Tensor | None = None) -> None:
    """Write the elements of `regions`, in order, to `flat` (n,), as float32 times `weight`.

    Regions are flat, of any float types up to 32 bits. With `mark` (1,) int32, `flat` has one more element at
    its end: infinite if the mark is not 0, else 0.

    >>> flat = torch.empty(4)
    >>> regions = [torch.tensor([2.0, 4.0]), torch.tensor([6.0], dtype=torch.float16)]
    >>> join(regions, flat, 0.5, torch.zeros(1, dtype=torch.int32)), flat
    (None, tensor([1., 2., 3., 0.]))
    """
    if mark is not None:
        flat[-1:].zero_().masked_fill_(mark != 0, torch.inf)
        flat = flat[:-1]
    if regions:
        # In one call: there may be hundreds of them.
        torch.cat(regions, out=flat).mul_(weight)


@contract(_can_split)
def split(flat: Tensor, regions: list[Tensor], mark: Tensor | None = None) -> None:
    """Write the elements of `flat` (n,) to `regions`, in order, rounded to the type of each. Further elements
    belong to no region.

    With `mark` (1,) int32, the mark becomes 1 if any element of `flat` is NaN or infinite. It stays as it is
    otherwise.

    >>> region, mark = torch.empty(2), torch.zeros(1, dtype=torch.int32)
    >>> split(torch.tensor([1.0, 2.0, torch.inf]), [region], mark), region, mark
    (None, tensor([1., 2.]), tensor([1], dtype=torch.int32))
    """
    if mark is not None:
        mark_not_finite.plain(flat, mark)
    if regions:
        sizes = [each.numel() for each in regions]
        # In one call, as above.
        torch._foreach_copy_(regions, flat[: sum(sizes)].split_with_sizes(sizes))
