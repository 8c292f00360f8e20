"""Codecs: tensor to payload and back; stateless and local."""

from gradwire.codec.base import Codec
from gradwire.codec.cast import cast
from gradwire.codec.select import Selector, everything, random_k, top_k
from gradwire.codec.sparse import sparse, values

__all__ = ["Codec", "Selector", "cast", "everything", "random_k", "sparse", "top_k", "values"]
