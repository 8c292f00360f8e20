"""Selectors: which elements travel; one method per file."""

from gradwire.codec.select.adacomp import AdaComp, ada_comp
from gradwire.codec.select.base import Selector, check_fixed_size, check_ratio, count_kept
from gradwire.codec.select.chunks import ChunkTopK, chunk_top_k
from gradwire.codec.select.everything import Everything, everything
from gradwire.codec.select.fixed import FixedThreshold, fixed_threshold
from gradwire.codec.select.layers import LayerTopK, layer_top_k
from gradwire.codec.select.mstopk import MSTopK, ms_top_k
from gradwire.codec.select.ramp import Ramp, ramp
from gradwire.codec.select.random import RandomK, random_k
from gradwire.codec.select.rated import RatedChunks, rated_chunks
from gradwire.codec.select.reuse import ReusedThreshold, reused_threshold
from gradwire.codec.select.room import filled
from gradwire.codec.select.sampled import SampledTopK, sampled_top_k
from gradwire.codec.select.sidco import Sidco, sidco
from gradwire.codec.select.topk import TopK, top_k

__all__ = [
    "AdaComp",
    "ChunkTopK",
    "Everything",
    "FixedThreshold",
    "LayerTopK",
    "MSTopK",
    "Ramp",
    "RandomK",
    "RatedChunks",
    "ReusedThreshold",
    "SampledTopK",
    "Selector",
    "Sidco",
    "TopK",
    "ada_comp",
    "check_fixed_size",
    "check_ratio",
    "chunk_top_k",
    "count_kept",
    "everything",
    "filled",
    "fixed_threshold",
    "layer_top_k",
    "ms_top_k",
    "ramp",
    "random_k",
    "rated_chunks",
    "reused_threshold",
    "sampled_top_k",
    "sidco",
    "top_k",
]
