"""The hot loops. Each has a contract in `reference/`, in plain torch, and implementations for devices.

The functions here are the contracts, computed by the implementation that takes the tensors of the call
(`dispatch`). What GComp does to bytes (`frames`, `huffman`, `checksums`) has one implementation, on the CPU:
frames are made where they are sent from.
"""

from __future__ import annotations

from functools import lru_cache

from gradwire.kernels import cpu, reference
from gradwire.kernels.cpu.jit import compiled_s
from gradwire.kernels.dispatch import declines, dispatched, on_device
from gradwire.kernels.frames import checksum
from gradwire.kernels.huffman import Lookups, canonical_codes, count_symbols, decode_symbols, encode_symbols
from gradwire.kernels.layouts import (
    LARGEST,
    BlockKind,
    Blocks,
    Grid,
    Norm,
    ScaledBlocks,
    scale_type,
    step_type,
)
from gradwire.kernels.payload import Form, Planes, Shape, Sound
from gradwire.kernels.pieces import Pieces, whole
from gradwire.kernels.preparing import prepare
from gradwire.kernels.range import LARGEST_GRADIENT, LARGEST_SUM, is_finite
from gradwire.kernels.reference.folding import Folded
from gradwire.kernels.reference.magnitudes import Histogram, magnitude_edges
from gradwire.kernels.reference.numerators import Terms
from gradwire.kernels.reference.places import choice, index_type
from gradwire.kernels.reference.threshold import Moments
from gradwire.kernels.reference.truncation import upper_words
from gradwire.kernels.reference.votes import ballot_words, count_groups

add_at = dispatched(reference.add_at, cpu.add_at)
add_blocks = dispatched(reference.add_blocks, cpu.add_blocks, on_device("add_blocks"))
add_chosen = dispatched(reference.add_chosen, cpu.add_chosen)
add_quantized = dispatched(reference.add_quantized, cpu.add_quantized)
add_signs = dispatched(reference.add_signs, cpu.add_signs, on_device("add_signs"))
add_upper = dispatched(reference.add_upper, cpu.add_upper)
apply_votes = dispatched(reference.apply_votes, cpu.apply_votes)
cast_votes = dispatched(reference.cast_votes, cpu.cast_votes)
chunk_topk_indices = dispatched(
    reference.chunk_topk_indices, cpu.chunk_topk_indices, on_device("chunk_topk_indices")
)
count_sketch = dispatched(reference.count_sketch, cpu.count_sketch)
count_sketch_estimates = dispatched(reference.count_sketch_estimates, cpu.count_sketch_estimates)
decode_blocks = dispatched(reference.decode_blocks, cpu.decode_blocks, on_device("decode_blocks"))
encode_blocks = dispatched(reference.encode_blocks, cpu.encode_blocks, on_device("encode_blocks"))
feedback_signs = dispatched(reference.feedback_signs, cpu.feedback_signs, on_device("feedback_signs"))
feedback_topk = dispatched(reference.feedback_topk, cpu.feedback_topk, on_device("feedback_topk"))
fold = dispatched(reference.fold, cpu.fold, on_device("fold"))
fold_momentum = dispatched(reference.fold_momentum, cpu.fold_momentum, on_device("fold_momentum"))
indices_near_maxima = dispatched(reference.indices_near_maxima, cpu.indices_near_maxima)
indices_reaching = dispatched(reference.indices_reaching, cpu.indices_reaching)
left_products = dispatched(reference.left_products, cpu.left_products)
magnitude_histogram = dispatched(reference.magnitude_histogram, cpu.magnitude_histogram)
mantissa_levels = dispatched(reference.mantissa_levels, cpu.mantissa_levels)
mask_zeros = dispatched(reference.mask_zeros, cpu.mask_zeros)
moments_reaching = dispatched(reference.moments_reaching, cpu.moments_reaching)
numerator_exponents = dispatched(reference.numerator_exponents, cpu.numerator_exponents)
numerators = dispatched(reference.numerators, cpu.numerators)
orthonormalise = dispatched(reference.orthonormalise, cpu.orthonormalise)
outer_products = dispatched(reference.outer_products, cpu.outer_products)
pack_bits = dispatched(reference.pack_bits, cpu.pack_bits)
pack_elias_fano = dispatched(reference.pack_elias_fano, cpu.pack_elias_fano)
pack_signs = dispatched(reference.pack_signs, cpu.pack_signs, on_device("pack_signs"))
pack_upper = dispatched(reference.pack_upper, cpu.pack_upper)
poison = dispatched(reference.poison, declines, on_device("poison"))
put = dispatched(reference.put, cpu.put)
quantize = dispatched(reference.quantize, cpu.quantize)
random_words = dispatched(reference.random_words, cpu.random_words)
reduce_blocks = dispatched(reference.reduce_blocks, cpu.reduce_blocks, on_device("reduce_blocks"))
rescale = dispatched(reference.rescale, declines, on_device("rescale"))
right_products = dispatched(reference.right_products, cpu.right_products)
sample_indices = lru_cache(maxsize=32)(dispatched(reference.sample_indices, cpu.sample_indices))
scatter = dispatched(reference.scatter, cpu.scatter)
stratified_indices = dispatched(reference.stratified_indices, cpu.stratified_indices)
take = dispatched(reference.take, cpu.take)
take_chosen = dispatched(reference.take_chosen, cpu.take_chosen)
take_topk = dispatched(reference.take_topk, cpu.take_topk, on_device("take_topk"))
tally = dispatched(reference.tally, cpu.tally)
topk_indices = dispatched(reference.topk_indices, cpu.topk_indices, on_device("topk_indices"))
unpack_bits = dispatched(reference.unpack_bits, cpu.unpack_bits)
unpack_elias_fano = dispatched(reference.unpack_elias_fano, cpu.unpack_elias_fano)
zero_idle = dispatched(reference.zero_idle, declines, on_device("zero_idle"))

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
    "Sound",
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
    "choice",
    "chunk_topk_indices",
    "compiled_s",
    "count_groups",
    "count_sketch",
    "count_sketch_estimates",
    "count_symbols",
    "decode_blocks",
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
    "is_finite",
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
    "poison",
    "prepare",
    "put",
    "quantize",
    "random_words",
    "reduce_blocks",
    "rescale",
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
    "zero_idle",
]
