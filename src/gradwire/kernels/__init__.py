"""Hot loops, each beside a plain-torch reference; callers need not know which one runs. One job per file."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels import cpu
from gradwire.kernels.bit_blocks import Blocks
from gradwire.kernels.blocks import (
    LARGEST,
    BlockKind,
    ScaledBlocks,
    add_blocks,
    encode_blocks,
    scale_type,
)
from gradwire.kernels.checksums import checksum
from gradwire.kernels.chosen import Form, Shape, add_chosen, take_chosen
from gradwire.kernels.chunks import chunk_topk_indices, indices_near_maxima
from gradwire.kernels.coded import pack_elias_fano, unpack_elias_fano
from gradwire.kernels.dispatch import is_fast, is_native
from gradwire.kernels.elias_fano import Planes
from gradwire.kernels.folding import Folded, fold, fold_momentum, mask_zeros
from gradwire.kernels.huffman import Lookups, canonical_codes, count_symbols, decode_symbols, encode_symbols
from gradwire.kernels.low_rank import left_products, orthonormalise, outer_products, right_products
from gradwire.kernels.magnitudes import Histogram, magnitude_edges, magnitude_histogram
from gradwire.kernels.noise import random_words
from gradwire.kernels.numerators import mantissa_levels, numerator_exponents, numerators
from gradwire.kernels.pieces import Pieces, whole
from gradwire.kernels.places import add_at, index_type, pack_bits, put, scatter, take, unpack_bits
from gradwire.kernels.sample import sample_indices
from gradwire.kernels.signs import add_signs, feedback_signs, pack_signs
from gradwire.kernels.sketches import count_sketch, count_sketch_estimates
from gradwire.kernels.stochastic import Grid, Norm, add_quantized, quantize, step_type
from gradwire.kernels.terms import Terms
from gradwire.kernels.threshold import Moments, indices_reaching, moments_reaching, stratified_indices
from gradwire.kernels.topk import feedback_topk, take_topk, topk_indices
from gradwire.kernels.truncation import add_upper, pack_upper, upper_words
from gradwire.kernels.votes import apply_votes, ballot_words, cast_votes, count_groups, tally

__all__ = [
    "LARGEST",
    "BlockKind",
    "Blocks",
    "Folded",
    "Form",
    "Grid",
    "Histogram",
    "Lookups",
    "Moments",
    "Norm",
    "Pieces",
    "Planes",
    "ScaledBlocks",
    "Shape",
    "Terms",
    "add_at",
    "add_blocks",
    "add_chosen",
    "add_quantized",
    "add_signs",
    "add_upper",
    "apply_votes",
    "ballot_words",
    "canonical_codes",
    "cast_votes",
    "checksum",
    "chunk_topk_indices",
    "count_groups",
    "count_sketch",
    "count_sketch_estimates",
    "count_symbols",
    "decode_symbols",
    "encode_blocks",
    "encode_symbols",
    "feedback_signs",
    "feedback_topk",
    "fold",
    "fold_momentum",
    "index_type",
    "indices_near_maxima",
    "indices_reaching",
    "is_fast",
    "is_native",
    "left_products",
    "magnitude_edges",
    "magnitude_histogram",
    "mantissa_levels",
    "mask_zeros",
    "moments_reaching",
    "numerator_exponents",
    "numerators",
    "orthonormalise",
    "outer_products",
    "pack_bits",
    "pack_elias_fano",
    "pack_signs",
    "pack_upper",
    "prepare",
    "put",
    "quantize",
    "random_words",
    "right_products",
    "sample_indices",
    "scale_type",
    "scatter",
    "step_type",
    "stratified_indices",
    "take",
    "take_chosen",
    "take_topk",
    "tally",
    "topk_indices",
    "unpack_bits",
    "unpack_elias_fano",
    "upper_words",
    "whole",
]


def prepare() -> None:
    """Compile (or load from the cache) every kernel now: compilation holds the interpreter lock."""
    x = torch.zeros(64)
    fold(torch.empty_like(x), x, x, 1.0)
    fold(torch.empty_like(x), None, x, 1.0)
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
    indices_near_maxima(x, 2 * x, 64)
    blocks, packed = Blocks((64,)), torch.empty(8, dtype=torch.uint8)
    levels = torch.empty(1, 2)
    pack_signs(x, blocks, levels, packed)
    add_signs(levels, packed, blocks, x)
    ballots = torch.zeros(1, 2, dtype=torch.int64)
    cast_votes(x, [64], 1, ballots, levels[0, :1])
    apply_votes(tally(ballots, 1)[None], [64], levels[0, :1], x)
    kinds: tuple[BlockKind, ...] = ("int8", "int4", "fp8")
    for kind in kinds:
        scaled = ScaledBlocks((64,), 64, kind)
        scales, codes = torch.empty(1), torch.empty(scaled.code_bytes, dtype=torch.uint8)
        encode_blocks(x, scaled, scales, codes, left=True)
        add_blocks(scales, codes, scaled, x, 1.0)
    add_upper(pack_upper(x, 18, left=True), 18, x, 1.0)
    hashes = torch.ones(1, 2, dtype=torch.int64)
    count_sketch_estimates(count_sketch(x, hashes, 2), hashes, torch.empty_like(x))
    _prepare_places(x)
    places, left, right = torch.tensor([[0, 8, 8, 0, 0]]), torch.ones(8), torch.ones(8)
    left_products(x, places, 1, left, right)
    right_products(x, places, 1, left, right)
    outer_products(x, places, 1, left, right)
    for factors in (left, left.double()):
        orthonormalise(factors, places[:, [0, 1]], 1)
    random_words(0, 64)
    magnitude_histogram(x)
    for bits in (2, 4, 8):
        grid = Grid((64,), 32, bits)
        steps, codes = torch.empty(2), torch.empty(grid.code_bytes, dtype=torch.uint8)
        quantize(x, grid, 0, steps, codes)
        add_quantized(steps, codes, grid, x, 1.0)
    exponents = torch.empty(64, dtype=torch.uint8)
    numerators(x, None, None, Terms(), torch.empty_like(x))
    numerator_exponents(x, x, x, Terms(), exponents)
    mantissa_levels(x, x, exponents)
    _prepare_frames(x)


def _prepare_places(x: torch.Tensor) -> None:
    """Chosen elements of x, and their places in every form."""
    for dtype in (torch.int32, torch.int64):
        indices = torch.arange(4, dtype=dtype)
        put(x, indices, take(x, indices))
        add_at(x, indices, torch.ones(4))
        packed = pack_bits(indices, 1)
        cpu.unpack_bits(packed.numpy(), indices.numpy())
    shape = Shape("bitmap", Planes(4, 64, 3), words=2, start=8, bytes=24, dtype=torch.float32)
    for dtype in (torch.int32, torch.int64):
        add_chosen(take_chosen(x, torch.arange(4, dtype=dtype), shape), shape, x)
    for numel in (64, 2**40):
        planes = Planes(4, numel, 3 if numel == 64 else 32)
        for dtype in (torch.int32, torch.int64):
            unpack_elias_fano(pack_elias_fano(torch.arange(4, dtype=dtype), planes), planes)


def _prepare_frames(x: torch.Tensor) -> None:
    """A frame of x, coded and decoded again."""
    lengths = np.zeros(256, np.uint8)
    lengths[[0, 255]] = 1
    lookups, how = Lookups(lengths), (False, False, False, np.uint32(0))
    words, same = x.numpy().view(np.uint32), np.zeros(cpu.chunks_coded.BLOCK, np.uint8)
    out, directory = np.zeros(x.numel() + 3, np.uint64), np.zeros((1, 8), np.uint16)
    counts = np.zeros((4, 256), np.int64)
    cpu.chunks_coded.encode_chunks(words, same[:0], same, how, lookups.encoding, 64, out, directory, counts)
    cpu.chunks_coded.decode_chunks(
        out, np.uint64(0), directory, 64, same[:0], same, how, lookups.decoding, words, x.numpy(), False
    )
    count_symbols(torch.zeros(4, dtype=torch.uint8))
    checksum(x)
