"""Kernels called once, so that they are compiled, or loaded from the cache, before they hold anyone up."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu
from gradwire.kernels.bit_blocks import Blocks
from gradwire.kernels.blocks import BlockKind, ScaledBlocks, add_blocks, encode_blocks
from gradwire.kernels.checksums import checksum
from gradwire.kernels.chosen import Shape, add_chosen, take_chosen
from gradwire.kernels.chunks import chunk_topk_indices, indices_near_maxima
from gradwire.kernels.coded import pack_elias_fano, unpack_elias_fano
from gradwire.kernels.elias_fano import Planes
from gradwire.kernels.folding import fold, fold_momentum, mask_zeros
from gradwire.kernels.huffman import Lookups, count_symbols
from gradwire.kernels.low_rank import left_products, orthonormalise, outer_products, right_products
from gradwire.kernels.magnitudes import magnitude_histogram
from gradwire.kernels.noise import random_words
from gradwire.kernels.numerators import mantissa_levels, numerator_exponents, numerators
from gradwire.kernels.places import add_at, pack_bits, put, take
from gradwire.kernels.sample import sample_indices
from gradwire.kernels.signs import add_signs, pack_signs
from gradwire.kernels.sketches import count_sketch, count_sketch_estimates
from gradwire.kernels.stochastic import Grid, add_quantized, quantize
from gradwire.kernels.terms import Terms
from gradwire.kernels.threshold import indices_reaching, moments_reaching, stratified_indices
from gradwire.kernels.topk import feedback_topk, take_topk, topk_indices
from gradwire.kernels.truncation import add_upper, pack_upper
from gradwire.kernels.votes import apply_votes, cast_votes, tally


def prepare(modules: Collection[str] | None = None, turn: int = 0) -> None:
    """Compile (or load from the cache) kernels now: it takes seconds, and holds the interpreter lock.

    `modules` are names of modules of this package, such as "topk": what they call is prepared, once in a
    process; by default all of it is. Processes of one machine that do this at the same time begin at
    different modules, if there are enough, when each has a `turn` of its own, 0, 1, 2 and so on; what one of
    them has compiled, the others find in the cache.

    >>> prepare({"topk"})
    """
    names = [name for name in _PARTS if modules is None or name in modules]
    # Multiples of the golden ratio lie far apart, whichever turns are on this machine.
    first = int(turn * 0.618034 % 1.0 * len(names))
    with torch.device("cpu"):  # whatever the user's default is
        for name in names[first:] + names[:first]:
            if name not in _done:
                _PARTS[name](torch.zeros(64, dtype=torch.float32))
                _done.add(name)


_done: set[str] = set()


def _blocks(x: Tensor) -> None:
    kinds: tuple[BlockKind, ...] = ("int8", "int4", "fp8")
    for kind in kinds:
        scaled = ScaledBlocks((64,), 64, kind)
        scales, codes = x.new_empty(1), torch.empty(scaled.code_bytes, dtype=torch.uint8)
        encode_blocks(x, scaled, scales, codes, left=True)
        add_blocks(scales, codes, scaled, x, 1.0)


def _checksums(x: Tensor) -> None:
    checksum(x)


def _chosen(x: Tensor) -> None:
    shape = Shape("bitmap", Planes(4, 64, 3), words=2, start=8, bytes=24, dtype=torch.float32)
    for dtype in (torch.int32, torch.int64):
        add_chosen(take_chosen(x, torch.arange(4, dtype=dtype), shape), shape, x)


def _chunks(x: Tensor) -> None:
    chunk_topk_indices(x, 64, 1)
    chunk_topk_indices(x, 64, 2)
    indices_near_maxima(x, 2 * x, 64)


def _coded(_x: Tensor) -> None:
    for numel in (64, 2**40):
        planes = Planes(4, numel, 3 if numel == 64 else 32)
        for dtype in (torch.int32, torch.int64):
            unpack_elias_fano(pack_elias_fano(torch.arange(4, dtype=dtype), planes), planes)


def _folding(x: Tensor) -> None:
    fold(torch.empty_like(x), x, x, 1.0)
    fold(torch.empty_like(x), None, x, 1.0)
    fold_momentum((torch.empty_like(x), torch.empty_like(x)), (x, x), x, 0.9)
    mask_zeros(torch.empty_like(x), x)


def _frames(x: Tensor) -> None:
    """A frame of x, coded and decoded again; what a receiver gets, and its symbols."""
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
    each, fields = np.zeros((3, 64), np.uint8), np.empty(64, np.uint32)
    cpu.mantissa.round_words(words, each[0], how, fields)
    cpu.mantissa.split(words, each[0], how, each[1], each[2], fields)


def _huffman(_x: Tensor) -> None:
    count_symbols(torch.zeros(4, dtype=torch.uint8))


def _low_rank(x: Tensor) -> None:
    places, left, right = torch.tensor([[0, 8, 8, 0, 0]]), x.new_ones(8), x.new_ones(8)
    left_products(x, places, 1, left, right)
    right_products(x, places, 1, left, right)
    outer_products(x, places, 1, left, right)
    for factors in (left, left.double()):
        orthonormalise(factors, places[:, [0, 1]], 1)


def _magnitudes(x: Tensor) -> None:
    magnitude_histogram(x)


def _noise(_x: Tensor) -> None:
    random_words(0, 64)


def _numerators(x: Tensor) -> None:
    exponents = torch.empty(64, dtype=torch.uint8)
    numerators(x, None, None, Terms(), torch.empty_like(x))
    numerator_exponents(x, x, x, Terms(), exponents)
    mantissa_levels(x, x, exponents)


def _places(x: Tensor) -> None:
    for dtype in (torch.int32, torch.int64):
        indices = torch.arange(4, dtype=dtype)
        put(x, indices, take(x, indices))
        add_at(x, indices, x.new_ones(4))
        packed = pack_bits(indices, 1)
        cpu.unpack_bits(packed.numpy(), indices.numpy())


def _sample(_x: Tensor) -> None:
    sample_indices(64, 8, 0)


def _signs(x: Tensor) -> None:
    blocks, packed, levels = Blocks((64,)), torch.empty(8, dtype=torch.uint8), x.new_empty(1, 2)
    pack_signs(x, blocks, levels, packed)
    add_signs(levels, packed, blocks, x)


def _sketches(x: Tensor) -> None:
    hashes = torch.ones(1, 2, dtype=torch.int64)
    count_sketch_estimates(count_sketch(x, hashes, 2), hashes, torch.empty_like(x))


def _stochastic(x: Tensor) -> None:
    for bits in (2, 4, 8):
        grid = Grid((64,), 32, bits)
        steps, codes = x.new_empty(2), torch.empty(grid.code_bytes, dtype=torch.uint8)
        quantize(x, grid, 0, steps, codes)
        add_quantized(steps, codes, grid, x, 1.0)


def _threshold(x: Tensor) -> None:
    indices_reaching(x, 1.0, 16)
    moments_reaching(x, 1.0)
    stratified_indices(64, 8, 0)


def _topk(x: Tensor) -> None:
    topk_indices(x, 16)
    take_topk(x, 16)
    feedback_topk(x, torch.zeros_like(x), 16)


def _truncation(x: Tensor) -> None:
    add_upper(pack_upper(x, 18, left=True), 18, x, 1.0)


def _votes(x: Tensor) -> None:
    ballots, scales = torch.zeros(1, 2, dtype=torch.int64), x.new_empty(1)
    cast_votes(x, [64], 1, ballots, scales)
    apply_votes(tally(ballots, 1)[None], [64], scales, x)
    apply_votes(torch.zeros(1, 2, 2, dtype=torch.int64)[..., :1], [64], scales, x)  # as out of larger rows


_PARTS: dict[str, Callable[[Tensor], None]] = {
    "blocks": _blocks,
    "checksums": _checksums,
    "chosen": _chosen,
    "chunks": _chunks,
    "coded": _coded,
    "cpu": _frames,
    "folding": _folding,
    "huffman": _huffman,
    "low_rank": _low_rank,
    "magnitudes": _magnitudes,
    "noise": _noise,
    "numerators": _numerators,
    "places": _places,
    "sample": _sample,
    "signs": _signs,
    "sketches": _sketches,
    "stochastic": _stochastic,
    "threshold": _threshold,
    "topk": _topk,
    "truncation": _truncation,
    "votes": _votes,
}
"""By the module whose callers need it; of `cpu` itself, what codes whole chunks."""
