"""The hot loops. Each has a contract in `reference/`, in plain torch, and implementations for devices.

The functions here are the contracts, computed by the implementation that takes the tensors of the call
(`dispatch`). GComp's work on bytes (`frames`, `huffman`, `checksums`) has one implementation, on the CPU,
because frames are sent from there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradwire.kernels.subjects import SUBJECTS

if TYPE_CHECKING:
    from gradwire.kernels.cpu.jit import announced, compiled_s
    from gradwire.kernels.frames import checksum
    from gradwire.kernels.huffman import (
        Lookups,
        canonical_codes,
        count_symbols,
        decode_symbols,
        encode_symbols,
    )
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
    from gradwire.kernels.reference.blocks import add_blocks, decode_blocks, encode_blocks, reduce_blocks
    from gradwire.kernels.reference.chosen import add_chosen, pack_elias_fano, take_chosen, unpack_elias_fano
    from gradwire.kernels.reference.chunks import chunk_topk_count, chunk_topk_indices, indices_near_maxima
    from gradwire.kernels.reference.draws import random_words, sample_indices, stratified_indices
    from gradwire.kernels.reference.flagged import poison, zero_idle
    from gradwire.kernels.reference.folding import Folded, fold, fold_momentum, mask_zeros
    from gradwire.kernels.reference.levels import add_levels, encode_levels
    from gradwire.kernels.reference.low_rank import (
        left_products,
        orthonormalise,
        outer_products,
        right_products,
    )
    from gradwire.kernels.reference.magnitudes import Histogram, magnitude_edges, magnitude_histogram
    from gradwire.kernels.reference.places import (
        add_at,
        choice,
        index_type,
        pack_bits,
        put,
        scatter,
        take,
        unpack_bits,
    )
    from gradwire.kernels.reference.signs import add_signs, feedback_signs, pack_signs
    from gradwire.kernels.reference.sketches import count_sketch, count_sketch_estimates
    from gradwire.kernels.reference.stochastic import add_quantized, quantize
    from gradwire.kernels.reference.terms import Terms, mantissa_levels, numerator_exponents, numerators
    from gradwire.kernels.reference.threshold import Moments, indices_reaching, moments_reaching
    from gradwire.kernels.reference.topk import feedback_topk, take_topk, topk_indices
    from gradwire.kernels.reference.truncation import add_upper, pack_upper, upper_words
    from gradwire.kernels.reference.votes import apply_votes, ballot_words, cast_votes, count_groups, tally
else:
    _HOMES = {
        "cpu.jit": ["announced", "compiled_s"],
        "frames": ["checksum"],
        "huffman": ["Lookups", "canonical_codes", "count_symbols", "decode_symbols", "encode_symbols"],
        "layouts": [
            "LARGEST",
            "BlockKind",
            "Blocks",
            "Grid",
            "Norm",
            "ScaledBlocks",
            "scale_type",
            "step_type",
        ],
        "payload": ["Form", "Planes", "Shape", "Sound"],
        "pieces": ["Pieces", "whole"],
        "preparing": ["prepare"],
        "range": ["LARGEST_GRADIENT", "LARGEST_SUM", "is_finite"],
        "reference.chunks": ["chunk_topk_count"],
        "reference.folding": ["Folded"],
        "reference.magnitudes": ["Histogram", "magnitude_edges"],
        "reference.terms": ["Terms"],
        "reference.places": ["choice", "index_type"],
        "reference.threshold": ["Moments"],
        "reference.truncation": ["upper_words"],
        "reference.votes": ["ballot_words", "count_groups"],
    }

    def __getattr__(name: str) -> Any:
        if name in SUBJECTS:
            globals()[name] = found = import_module("gradwire.kernels.dispatch").front(name)
            return found
        for home, names in _HOMES.items():
            if name in names:
                globals()[name] = found = getattr(import_module(f"{__name__}.{home}"), name)
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "add_levels",
    "add_quantized",
    "add_signs",
    "add_upper",
    "announced",
    "apply_votes",
    "ballot_words",
    "canonical_codes",
    "cast_votes",
    "checksum",
    "choice",
    "chunk_topk_count",
    "chunk_topk_indices",
    "compiled_s",
    "count_groups",
    "count_sketch",
    "count_sketch_estimates",
    "count_symbols",
    "decode_blocks",
    "decode_symbols",
    "encode_blocks",
    "encode_levels",
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
