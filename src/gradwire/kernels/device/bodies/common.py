"""What several kernels do."""

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """The bits of float32 without the sign: as integers they order NaN and Inf above everything."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load(pointers, mask):
    """As float32, exactly; zeros where a mask hides them. Without a mask loads can be vectors."""
    if mask is None:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask, other=0.0)
    return found.to(tl.float32)
