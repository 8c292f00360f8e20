"""Codecs: tensor to payload and back; stateless and local."""

from gradwire.codec.base import Codec
from gradwire.codec.cast import cast
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
    reused_threshold,
    sampled_top_k,
    sidco,
    top_k,
)
from gradwire.codec.sparse import sparse, values
from gradwire.codec.tern_grad import tern_grad

__all__ = [
    "Codec",
    "Selector",
    "ada_comp",
    "cast",
    "chunk_top_k",
    "everything",
    "fixed_threshold",
    "layer_top_k",
    "ms_top_k",
    "qsgd",
    "random_k",
    "reused_threshold",
    "sampled_top_k",
    "sidco",
    "sparse",
    "tern_grad",
    "top_k",
    "values",
]
