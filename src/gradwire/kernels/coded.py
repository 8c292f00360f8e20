"""Indices as Elias and Fano's planes; the layout is `gradwire.kernels.elias_fano`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference_elias_fano
from gradwire.kernels.dispatch import is_native
from gradwire.kernels.elias_fano import BLOCK, COUNTS, DECODING, ENCODING, ZEROS_BEFORE, Planes
from gradwire.kernels.places import index_type


def pack_elias_fano(indices: Tensor, planes: Planes) -> Tensor:
    """Ascending, distinct `indices` (count,) within 0 … numel - 1 as (words,) int32, laid out as `planes`.

    `ValueError` when they are out of order or range so that the kernel would write where it must not.

    >>> pack_elias_fano(torch.tensor([1, 20, 40]), Planes(count=3, numel=50, low_bits=3))
    tensor([409,  20,   4], dtype=torch.int32)
    """
    if indices.numel() != planes.count:
        raise ValueError(f"{indices.numel()} indices do not fit a layout for {planes.count}")
    if not is_native(indices):
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
    if not is_native(packed):
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
