"""Kernels for accelerators, in Triton: names and signatures of the contracts in `reference/`, none of which
reads a number on the host.

Their results depend on the tensors of the call alone: no kernel is chosen by a measurement, because ranks
could choose differently. Imported with the first CUDA tensor (`dispatch.on_device`): Triton is optional.
"""

from gradwire.kernels.device.blocks import add_blocks, decode_blocks, encode_blocks, reduce_blocks
from gradwire.kernels.device.chunks import chunk_topk_indices
from gradwire.kernels.device.flagged import poison, zero_idle
from gradwire.kernels.device.folding import fold, fold_momentum
from gradwire.kernels.device.signs import add_signs, feedback_signs, pack_signs
from gradwire.kernels.device.stochastic import add_quantized, quantize
from gradwire.kernels.device.topk import feedback_topk, take_topk, topk_indices

__all__ = [
    "add_blocks",
    "add_quantized",
    "add_signs",
    "chunk_topk_indices",
    "decode_blocks",
    "encode_blocks",
    "feedback_signs",
    "feedback_topk",
    "fold",
    "fold_momentum",
    "pack_signs",
    "poison",
    "quantize",
    "reduce_blocks",
    "take_topk",
    "topk_indices",
    "zero_idle",
]
