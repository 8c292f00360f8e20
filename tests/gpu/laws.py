"""The laws of exchanges and of whole steps, with tensors on the device; ranks are threads."""

from __future__ import annotations

from tests.gpu.by_pytest import run_tests
from tests.gpu.outcomes import Tell

FILES = ("tests/laws/test_exchanges.py", "tests/laws/test_step.py")


def run(tell: Tell, match: str | None = None) -> None:
    """What GComp sends is made of bytes on the CPU: its recipes are carried by way of the host."""
    run_tests(tell, FILES, f"not gcomp and ({match})" if match else "not gcomp", workers=8)
