"""The contracts: what each kernel computes, with an example, in plain torch for every device and type.

Slow and obvious: the tests compare every other implementation with it.
"""

from gradwire.kernels.reference.blocks import add_blocks, decode_blocks, encode_blocks, reduce_blocks
from gradwire.kernels.reference.chosen import add_chosen, pack_elias_fano, take_chosen, unpack_elias_fano
from gradwire.kernels.reference.chunks import chunk_topk_indices, indices_near_maxima
from gradwire.kernels.reference.draws import random_words, sample_indices, splitmix64, stratified_indices
from gradwire.kernels.reference.flagged import poison, rescale, zero_idle
from gradwire.kernels.reference.folding import fold, fold_momentum, mask_zeros
from gradwire.kernels.reference.low_rank import left_products, orthonormalise, outer_products, right_products
from gradwire.kernels.reference.magnitudes import magnitude_histogram
from gradwire.kernels.reference.numerators import mantissa_levels, numerator_exponents, numerators
from gradwire.kernels.reference.places import add_at, pack_bits, put, scatter, take, unpack_bits
from gradwire.kernels.reference.signs import add_signs, feedback_signs, pack_signs
from gradwire.kernels.reference.sketches import count_sketch, count_sketch_buckets, count_sketch_estimates
from gradwire.kernels.reference.stochastic import add_quantized, quantize
from gradwire.kernels.reference.threshold import indices_reaching, moments_reaching
from gradwire.kernels.reference.topk import feedback_topk, take_topk, topk_indices
from gradwire.kernels.reference.truncation import add_upper, pack_upper
from gradwire.kernels.reference.votes import apply_votes, cast_votes, tally

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
    "count_sketch_buckets",
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
    "poison",
    "put",
    "quantize",
    "random_words",
    "reduce_blocks",
    "rescale",
    "right_products",
    "sample_indices",
    "scatter",
    "splitmix64",
    "stratified_indices",
    "take",
    "take_chosen",
    "take_topk",
    "tally",
    "topk_indices",
    "unpack_bits",
    "unpack_elias_fano",
    "zero_idle",
]
