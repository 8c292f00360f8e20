"""How much of the tables a run tries, by the variable `GRADWIRE_LAWS`.

- "few", the default: of each kind of method some rows. Which ones, the seed of the run decides.
- "sample": all methods, in rows in which any two values of two factors meet.
- "full": everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from random import Random
from typing import TypeVar

Value = TypeVar("Value")
DEPTHS = ("few", "sample", "full")
DEPTH = os.environ.get("GRADWIRE_LAWS", DEPTHS[0])
assert DEPTH in DEPTHS, f"GRADWIRE_LAWS={DEPTH!r} is none of {', '.join(DEPTHS)}"
FEW, FULL = DEPTH == "few", DEPTH == "full"


def seed() -> int:
    """Of all that is drawn: `GRADWIRE_LAWS_SEED`, which `tests/conftest.py` draws for each run."""
    return int(os.environ.get("GRADWIRE_LAWS_SEED", "0"))


def drawn(values: Iterable[Value], few: int, key: str) -> list[Value]:
    """All values, or where few rows are tried `few` of them, in their order. `key` says for what."""
    every = list(values)
    if not FEW or few >= len(every):
        return every
    kept = set(Random(f"{seed()} {key}").sample(range(len(every)), few))
    return [value for number, value in enumerate(every) if number in kept]
