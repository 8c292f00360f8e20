"""Hot loops, each beside a plain-torch reference; callers need not know which one runs. One job per file."""

from __future__ import annotations

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
from gradwire.kernels.cpu.jit import compiled_s
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
from gradwire.kernels.preparing import prepare
from gradwire.kernels.range import LARGEST_GRADIENT, LARGEST_SUM, is_finite
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
    "LARGEST_GRADIENT",
    "LARGEST_SUM",
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
    "compiled_s",
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
    "is_finite",
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
