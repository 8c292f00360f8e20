"""Kernels for the CPU, compiled by Numba: one pass over memory per task, without the interpreter lock.

The functions on tensors have the names and signatures of the contracts in `reference/`, and stand above the
kernels that they call. A kernel uses no constant from outside this folder: compiled code contains constants,
and the cache is stamped with the sources of this folder alone.

No `parallel=True`: Numba's workqueue layer aborts the process when two threads use it.
"""

from gradwire.kernels.cpu.blocks import add_blocks, decode_blocks, encode_blocks, reduce_blocks
from gradwire.kernels.cpu.chosen import add_chosen, pack_elias_fano, take_chosen, unpack_elias_fano
from gradwire.kernels.cpu.chunks import chunk_topk_indices, indices_near_maxima
from gradwire.kernels.cpu.draws import random_words, sample_indices, stratified_indices
from gradwire.kernels.cpu.folding import fold, fold_momentum, mask_zeros
from gradwire.kernels.cpu.low_rank import left_products, orthonormalise, outer_products, right_products
from gradwire.kernels.cpu.magnitudes import magnitude_histogram
from gradwire.kernels.cpu.numerators import mantissa_levels, numerator_exponents, numerators
from gradwire.kernels.cpu.places import add_at, pack_bits, put, scatter, take, unpack_bits
from gradwire.kernels.cpu.signs import add_signs, feedback_signs, pack_signs
from gradwire.kernels.cpu.sketches import count_sketch, count_sketch_estimates
from gradwire.kernels.cpu.stochastic import add_quantized, quantize
from gradwire.kernels.cpu.threshold import indices_reaching, moments_reaching
from gradwire.kernels.cpu.topk import feedback_topk, take_topk, topk_indices
from gradwire.kernels.cpu.truncation import add_upper, pack_upper
from gradwire.kernels.cpu.votes import apply_votes, cast_votes, tally

__all__ = [
    "add_at",
    "add_blocks",
    "add_chosen",
    "add_quantized",
    "add_signs",
    "add_upper",
    "apply_votes",
    "cast_votes",
    "chunk_topk_indices",
    "count_sketch",
    "count_sketch_estimates",
    "decode_blocks",
    "encode_blocks",
    "feedback_signs",
    "feedback_topk",
    "fold",
    "fold_momentum",
    "indices_near_maxima",
    "indices_reaching",
    "left_products",
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
    "put",
    "quantize",
    "random_words",
    "reduce_blocks",
    "right_products",
    "sample_indices",
    "scatter",
    "stratified_indices",
    "take",
    "take_chosen",
    "take_topk",
    "tally",
    "topk_indices",
    "unpack_bits",
    "unpack_elias_fano",
]
