"""Kernels: the inner loops of codecs and memories, one file per subject: `from gradwire.kernels.topk import
topk_indices`.

A file here holds *contracts*: docstring, example, argument check, and plain torch for every device and type.
A file of the same name in `cpu/` holds *twins* compiled by Numba; one in `device/` holds twins in Triton.
`dispatch` chooses among them, once per plan or by the tensors of a call. `frames` and `huffman` (bytes of
GComp) run on the CPU only, because frames are sent from there. `compiler` compiles kernels before a training
step waits for them.
"""
