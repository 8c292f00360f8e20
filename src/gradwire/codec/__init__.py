"""Codecs: tensor to payload and back; stateless and local."""

from gradwire.codec.base import Codec
from gradwire.codec.blocks import blocks
from gradwire.codec.cast import cast
from gradwire.codec.one_bit import one_bit
from gradwire.codec.qsgd import qsgd
from gradwire.codec.select import (
    Selector,
    ada_comp,
    chunk_top_k,
    everything,
    fixed_threshold,
    layer_top_k,
    ms_top_k,
    random_k,
    rated_chunks,
    reused_threshold,
    sampled_top_k,
    sidco,
    top_k,
)
from gradwire.codec.sign import sign
from gradwire.codec.sparse import sparse, values
from gradwire.codec.sparse_coded import sparse_coded
from gradwire.codec.tern_grad import tern_grad
from gradwire.codec.truncate import truncate

__all__ = [
    "Codec",
    "Selector",
    "ada_comp",
    "blocks",
    "cast",
    "chunk_top_k",
    "everything",
    "fixed_threshold",
    "layer_top_k",
    "ms_top_k",
    "one_bit",
    "qsgd",
    "random_k",
    "rated_chunks",
    "reused_threshold",
    "sampled_top_k",
    "sidco",
    "sign",
    "sparse",
    "sparse_coded",
    "tern_grad",
    "top_k",
    "truncate",
    "values",
]
