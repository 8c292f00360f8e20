"""The kernels, in Triton: untyped, and called by the launchers above only.

Bits equal those of the CPU's kernels, so: divisions by `div_rn`, roots by `sqrt_rn`, rounding to narrow types
in integers, magnitudes compared as integers, since a float maximum drops NaN. Offsets are 64-bit integers.
Lengths are not specialised, or a kernel would be compiled anew whenever one is a multiple of 16.
"""

ENTRIES = (
    "add_quantized",
    "add_signs",
    "chunk_maxima",
    "count_digits",
    "count_kept",
    "decode_blocks",
    "encode_blocks",
    "find_tops",
    "fold",
    "fold_momentum",
    "pack_signs",
    "poison",
    "quantize",
    "reduce_blocks",
    "set_levels",
    "set_steps",
    "settle",
    "sift",
    "sum_sides",
    "sum_squares",
    "take_kept",
    "zero_idle",
)
"""The kernels that are launched; the others are parts of them."""
