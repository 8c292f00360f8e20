"""Benchmarks, one file per question: `python -m benchmarks.NAME`."""

import os

os.environ.setdefault("GRADWIRE_COMPILE_FIRST", "1")  # what is timed is compiled, or gradients would be dense
