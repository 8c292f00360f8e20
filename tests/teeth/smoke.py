"""One step of `dense` and one of `int8` on threads: a fault that ends here is no question to tests.

Imports all that `attach` needs. Before, kernels of the files that are named are compiled, with those that use
them. `python -m tests.teeth.smoke src/gradwire/kernels/cpu/topk.py`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from gradwire.comm import Comm, run_ranks
from gradwire.kernels import compiler
from tests.support.rig import Rig, gradients
from tests.teeth.copies import dependents


def _step(comm: Comm, text: str) -> None:
    outcome = Rig(comm, text).step(gradients(comm.rank, 0))
    assert outcome.error is None


if __name__ == "__main__":
    compiler.prepare(dependents({Path(path).stem for path in sys.argv[1:]}) & compiler.every())
    import_module("gradwire._api.attach")
    run_ranks(2, lambda comm: _step(comm, "dense"))
    run_ranks(2, lambda comm: _step(comm, "int8"))
