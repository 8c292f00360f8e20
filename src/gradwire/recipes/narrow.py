"""The option `values` of several recipes: the type, or the code, in which chosen values travel."""

from typing import Literal, cast, get_args

import torch

from gradwire.codec.base import Codec
from gradwire.codec.levels import four_levels
from gradwire.codec.select.base import Selector
from gradwire.codec.sparse import sparse, sparse_coded
from gradwire.kernels.layouts import BlockKind

Values = Literal["full", "fp16", "bf16"]
"""Formats of values that are summed in a collective, or sent as they are."""
CodedValues = Literal["full", "fp16", "bf16", "int8", "int4", "int2"]
"""Formats of values that every rank sends to all others."""
BLOCK = 64
"""Values per scale of int8 and int4, a sixteenth of a byte each, and per two levels of int2."""
_DTYPES = {"full": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(values: Values) -> torch.dtype | None:
    """The type that `values` names, or `None` for the gradient's own. Raises `ValueError` for an unknown
    name.

    >>> dtype_of("bf16")
    torch.bfloat16
    """
    if values not in _DTYPES:
        raise ValueError(f"values={values!r} is none of {', '.join(get_args(Values))}")
    return _DTYPES[values]


def coded(selector: Selector, values: CodedValues) -> Codec:
    """Places and values, in 16, 8, 4 or 2 bits each if asked for.

    >>> from gradwire.codec.select.topk import top_k
    >>> from gradwire.unit.context import ExchangeContext
    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=1)
    >>> kinds = "full", "fp16", "int8", "int4", "int2"
    >>> [coded(top_k(0.01), kind).payload(10**6, torch.float32, ctx)[0] for kind in kinds]
    [50576, 30576, 21204, 16204, 14332]
    """
    if values == "int2":
        return sparse_coded(selector, four_levels(BLOCK))
    if values in ("int8", "int4"):
        from gradwire.codec.blocks import blocks  # here: what is imported is compiled

        return sparse_coded(selector, blocks(cast("BlockKind", values), BLOCK))
    if values not in get_args(CodedValues):
        raise ValueError(f"values={values!r} is none of {', '.join(get_args(CodedValues))}")
    return sparse(selector, dtype_of(cast("Values", values)))
