"""One part of `tests.gpu.run`, in a process of its own: `python -m tests.gpu.part NAME [MATCH]`.

The module `tests.gpu.NAME` has a function `run(tell, match)`, which tells the outcome of each check.
"""

from __future__ import annotations

import sys
from importlib import import_module

from tests.gpu.outcomes import Outcome


def say(outcome: Outcome) -> None:
    """On a line of its own, wherever the log stands."""
    print(f"\n{outcome.line()}", flush=True)


def main(name: str, match: str | None = None) -> None:
    """Run it."""
    import_module(f"tests.gpu.{name}").run(say, match)


if __name__ == "__main__":
    main(*sys.argv[1:])
