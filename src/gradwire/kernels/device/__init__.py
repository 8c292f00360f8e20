"""Kernels for accelerators, in Triton, none of which reads a number on the host.

A file has the name of the contracts' file in `kernels/`. Its typed functions launch the untyped kernels below
them, and have the contracts' names and signatures. Their results depend on the tensors of the call alone: no
kernel is chosen by a measurement, because ranks could choose differently. Files are imported with the first
CUDA tensor (`dispatch`): Triton is optional.

Bits equal those of the CPU's kernels, so: divisions by `div_rn`, roots by `sqrt_rn`, rounding to narrow types
in integers, magnitudes compared as integers, since a float maximum drops NaN. Offsets are 64-bit integers.
Lengths are not specialised, or a kernel would be compiled anew whenever one is a multiple of 16.
"""
