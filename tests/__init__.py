"""Tests, and the tools beside them: comparisons of bits, planted faults, chaos, checks on a GPU."""

import os

# On an empty cache of kernels, too, a recipe runs from its first step on: no bit depends on the cache.
os.environ.setdefault("GRADWIRE_COMPILE_FIRST", "1")
