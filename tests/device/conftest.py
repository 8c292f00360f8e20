"""Kernels for devices on CPU tensors, interpreted by Triton, whose functions decide at import what they are.

Where tests run on a device (`tests/support/where.py`), they are compiled instead. The variable is set for
that import alone, so that neither other tests of this process nor processes that they start see it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest

from tests.support.twins import files
from tests.support.where import WHERE

if find_spec("triton") is not None and WHERE.type == "cpu":
    assert "triton" not in sys.modules, "Triton was imported before it could be told to interpret"
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import_module("triton.experimental.gluon")  # otherwise the first launch would import it
        files("gradwire.kernels.device")
    finally:
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True)
def _as_quiet_as_a_device() -> Iterator[None]:
    """NumPy, which interprets, would warn of overflow and NaN."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _outputs_are_poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """A kernel that leaves an element out does not find the right one there by chance."""
    if not request.node.path.name.startswith("test_kernels_"):
        yield
        return
    from tests.device.there import Poisoned

    with Poisoned():
        yield
