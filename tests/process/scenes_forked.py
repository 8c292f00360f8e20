"""What forked ranks do in `test_forked.py`: each gets the writing end of a pipe."""

from __future__ import annotations

import os
import sys
import time


def look_around(pipe: int) -> None:
    """Say where this rank is, and end badly."""
    print("printed")
    os.write(pipe, f"{os.environ['RANK']} {os.getsid(0) == os.getpid()}".encode())
    sys.exit(3)


def linger(pipe: int) -> None:
    """Say who this is, and stay."""
    os.write(pipe, str(os.getpid()).encode())
    time.sleep(60)
