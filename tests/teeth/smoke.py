"""One step of `dense` and one of `int8` on threads: a fault that ends here is no question to tests.

Imports all that `attach` needs. `python -m tests.teeth.smoke`.
"""

from __future__ import annotations

from importlib import import_module

from gradwire.comm import Comm, run_ranks
from tests.support.rig import Rig, gradients


def _step(comm: Comm, text: str) -> None:
    outcome = Rig(comm, text).step(gradients(comm.rank, 0))
    assert outcome.error is None


if __name__ == "__main__":
    import_module("gradwire._api.attach")
    run_ranks(2, lambda comm: _step(comm, "dense"))
    run_ranks(2, lambda comm: _step(comm, "int8"))
