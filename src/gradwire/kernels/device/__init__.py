"""Kernels for GPUs, in Triton. None of them reads a number on the host, but `ulps.pack_widths`: its code is
as long as changes make it.

A file has the name of the contracts' file in `kernels/`. Its typed functions are twins: they have the
contracts' names and signatures, and launch the untyped kernels below them. Results depend on the arguments
alone: no kernel is chosen by a measurement, because ranks could choose differently. Files are imported with
the first CUDA tensor (`dispatch`), because Triton is optional.

Bits equal those of the CPU's kernels. So divisions are `div_rn`, roots are taken in float64, and narrow types
are rounded by integers. Magnitudes are compared as integers, because a float maximum drops NaN. Offsets are
64-bit integers. Lengths are not specialised, or a kernel would be compiled anew for each length that is a
multiple of 16.
"""
