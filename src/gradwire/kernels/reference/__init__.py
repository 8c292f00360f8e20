"""The contracts: what each kernel computes, with an example, in plain torch for every device and type.

Slow and obvious: the tests compare every other implementation with it.
"""

from gradwire.kernels.subjects import on_first_use

__getattr__ = on_first_use(__name__)
