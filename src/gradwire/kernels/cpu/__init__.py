"""Kernels for the CPU, compiled by Numba: one pass over memory per task, without the interpreter lock.

A file has the name of the contracts' file in `kernels/`. Its functions on tensors are twins: they have the
contracts' names and signatures, and stand above the kernels that they call. A kernel uses no constant from
outside this folder and the one above: compiled code contains its constants, and the cache is keyed by the
sources of both.

No `parallel=True`: Numba's workqueue layer aborts the process when two threads use it.
"""
