"""Hot loops, each beside a plain-torch reference; callers need not know which one runs. One job per file."""

from __future__ import annotations

import torch

from gradwire.kernels import cpu
from gradwire.kernels.chunks import chunk_topk_indices, indices_near_maxima
from gradwire.kernels.coded import pack_elias_fano, unpack_elias_fano
from gradwire.kernels.elias_fano import Planes
from gradwire.kernels.folding import Folded, fold, fold_momentum, mask_zeros
from gradwire.kernels.noise import random_words
from gradwire.kernels.places import add_at, index_type, pack_bits, put, scatter, take, unpack_bits
from gradwire.kernels.sample import sample_indices
from gradwire.kernels.sketches import count_sketch, count_sketch_estimates
from gradwire.kernels.stochastic import Grid, Norm, add_quantized, quantize, step_type
from gradwire.kernels.threshold import Moments, indices_reaching, moments_reaching, stratified_indices
from gradwire.kernels.topk import feedback_topk, take_topk, topk_indices

__all__ = [
    "Folded",
    "Grid",
    "Moments",
    "Norm",
    "Planes",
    "add_at",
    "add_quantized",
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
    "quantize",
    "random_words",
    "sample_indices",
    "scatter",
    "step_type",
    "stratified_indices",
    "take",
    "take_topk",
    "topk_indices",
    "unpack_bits",
    "unpack_elias_fano",
]


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
        add_at(x, indices, torch.ones(4))
        packed = pack_bits(indices, 1)
        cpu.unpack_bits(packed.numpy(), indices.numpy())
    for numel in (64, 2**40):
        planes = Planes(4, numel, 3 if numel == 64 else 32)
        for dtype in (torch.int32, torch.int64):
            unpack_elias_fano(pack_elias_fano(torch.arange(4, dtype=dtype), planes), planes)
    random_words(0, 64)
    for bits in (2, 4, 8):
        grid = Grid((64,), 32, bits)
        steps, codes = torch.empty(2), torch.empty(grid.code_bytes, dtype=torch.uint8)
        quantize(x, grid, 0, steps, codes)
        add_quantized(steps, codes, grid, x, 1.0)
