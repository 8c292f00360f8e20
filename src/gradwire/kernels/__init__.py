"""The hot loops, a file for each subject: `from gradwire.kernels.topk import topk_indices`.

A file holds *contracts*: docstring, example, check, and plain torch for every device and type. `cpu/` has a
file of the same name with twins, compiled by Numba, and `device/` has some in Triton; `dispatch` chooses
between them, once for a plan, or by the tensors of a call. GComp's work on bytes (`frames`, `huffman`) has
one implementation, on the CPU, because frames are sent from there. `compiler` compiles kernels before a
training waits for them.
"""
