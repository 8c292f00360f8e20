"""Numba on the CPU: one pass over memory per job, without the interpreter lock; one job per file.

No `parallel=True`: Numba's workqueue layer aborts the process when two threads use it.
"""

from gradwire.kernels.cpu import chosen, chunks_coded, elias_fano, halves, huffman, mantissa
from gradwire.kernels.cpu.blocks import add_blocks, encode_blocks
from gradwire.kernels.cpu.checksum import checksum
from gradwire.kernels.cpu.chunks import chunk_maxima, chunk_topk, indices_near_maxima
from gradwire.kernels.cpu.fold import fold, fold_momentum, mask_zeros
from gradwire.kernels.cpu.low_rank import left_products, orthonormalise, outer_products, right_products
from gradwire.kernels.cpu.magnitudes import magnitude_histogram
from gradwire.kernels.cpu.noise import random_words
from gradwire.kernels.cpu.numerators import mantissa_levels, numerator_exponents, numerators
from gradwire.kernels.cpu.places import add_at, pack_bits, scatter, take, unpack_bits
from gradwire.kernels.cpu.sample import sample_indices
from gradwire.kernels.cpu.signs import add_signs, pack_signs
from gradwire.kernels.cpu.sketch import count_sketch, count_sketch_estimates
from gradwire.kernels.cpu.stochastic import add_quantized, quantize
from gradwire.kernels.cpu.threshold import indices_reaching, moments_reaching, stratified_indices
from gradwire.kernels.cpu.topk import take_topk, topk_indices
from gradwire.kernels.cpu.truncation import add_upper, pack_upper
from gradwire.kernels.cpu.votes import apply_votes, cast_votes, tally

__all__ = [
    "add_at",
    "add_blocks",
    "add_quantized",
    "add_signs",
    "add_upper",
    "apply_votes",
    "cast_votes",
    "checksum",
    "chosen",
    "chunk_maxima",
    "chunk_topk",
    "chunks_coded",
    "count_sketch",
    "count_sketch_estimates",
    "elias_fano",
    "encode_blocks",
    "fold",
    "fold_momentum",
    "halves",
    "huffman",
    "indices_near_maxima",
    "indices_reaching",
    "left_products",
    "magnitude_histogram",
    "mantissa",
    "mantissa_levels",
    "mask_zeros",
    "moments_reaching",
    "numerator_exponents",
    "numerators",
    "orthonormalise",
    "outer_products",
    "pack_bits",
    "pack_signs",
    "pack_upper",
    "quantize",
    "random_words",
    "right_products",
    "sample_indices",
    "scatter",
    "stratified_indices",
    "take",
    "take_topk",
    "tally",
    "topk_indices",
    "unpack_bits",
]
