"""The option `values` of several recipes: the type in which chosen values travel."""

from typing import Literal, get_args

import torch

Values = Literal["full", "fp16", "bf16"]
_DTYPES = {"full": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(values: Values) -> torch.dtype | None:
    """The type, or `None` for the gradient's own.

    >>> dtype_of("bf16")
    torch.bfloat16
    """
    if values not in _DTYPES:
        raise ValueError(f"values={values!r} is none of {', '.join(get_args(Values))}")
    return _DTYPES[values]
