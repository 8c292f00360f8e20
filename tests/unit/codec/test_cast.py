"""Shorter floating-point types."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.cast import cast
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped

AT = ExchangeContext(0, 0, 0, 1)


@looped(
    ("dtype", "sent", "arrives"),
    [
        (torch.float16, 1.0 + 2**-11, 1.0),  # half way between neighbours: to the even one
        (torch.float16, 1.0 + 3 * 2**-11, 1.0 + 2**-9),
        (torch.float16, 65504.0, 65504.0),
        (torch.float16, 65520.0, float("inf")),
        (torch.float16, 2.0**-24, 2.0**-24),
        (torch.float16, 2.0**-25, 0.0),
        (torch.bfloat16, 1.0 + 2**-8, 1.0),
        (torch.bfloat16, 2.0**127, 2.0**127),
        (torch.bfloat16, -70000.0, -70144.0),
    ],
)
def test_rounds_to_the_nearest(dtype: torch.dtype, sent: float, arrives: float) -> None:
    codec, out = cast(dtype), torch.zeros(1)
    codec.add_decoded(codec.encode(torch.tensor([sent]), AT), out, 1.0, AT)
    assert out.item() == arrives


@looped("dtype", [torch.float32, torch.int8])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"choose torch\.float16 or torch\.bfloat16"):
        cast(dtype)
