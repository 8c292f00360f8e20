"""Memory that former meetings have freed goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from gradwire.members.membership import return_freed

BLOCKS, BLOCK_BYTES = 2000, 2**16


def resident_bytes() -> int:
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


HAS_GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


@pytest.mark.skipif(not HAS_GLIBC, reason="needs glibc")
def test_freed_memory_below_a_block_that_is_held_goes_back_to_the_system() -> None:
    held = [torch.ones(BLOCK_BYTES, dtype=torch.uint8) for _ in range(BLOCKS)]
    del held[:-1]
    before = resident_bytes()
    return_freed()
    assert before - resident_bytes() > BLOCKS * BLOCK_BYTES // 2
    assert held[0].all()
