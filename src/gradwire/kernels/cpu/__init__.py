"""Kernels for the CPU, compiled by Numba: one pass over memory per task, without the interpreter lock.

The functions on tensors have the names and signatures of the contracts in `reference/`, and stand above the
kernels that they call. A kernel uses no constant from outside this folder: compiled code contains constants,
and the cache is stamped with the sources of this folder alone.

No `parallel=True`: Numba's workqueue layer aborts the process when two threads use it.
"""

from gradwire.kernels.subjects import on_first_use

__getattr__ = on_first_use(__name__)
