"""The laws of exchanges and of whole steps, with tensors on the device; ranks are threads."""

from __future__ import annotations

from tests.gpu.by_pytest import run_tests
from tests.gpu.outcomes import Tell

ON_DEVICE = "not gcomp and not flexible"
FILES = ("tests/laws/test_exchanges.py", "tests/laws/test_step.py")


def run(tell: Tell, match: str | None = None) -> None:
    """GComp makes bytes and Flexible reads histograms on the CPU: both are carried by way of the host."""
    run_tests(tell, FILES, f"{ON_DEVICE} and ({match})" if match else ON_DEVICE, workers=16)
