"""A file per rank in the folder of a checkpoint: nothing is sent, and every rank loads its own state.

It is for frameworks whose checkpoints are folders. `Wire.save` and `Wire.load` do the work, in a folder
inside.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from gradwire._api.wire import Wire
from gradwire.errors import GradwireWarning

NAME = "gradwire"


def save(wire: Wire, folder: str | os.PathLike[str], name: str = NAME) -> None:
    """Write every rank's state to `folder`/`name`. A collective; raises what `Wire.save` raises."""
    wire.save(Path(folder) / name)


def load(wire: Wire, folder: str | os.PathLike[str], name: str = NAME) -> bool:
    """Load the state that `save` has written; return whether there was one. A collective.

    Warns if there is none, as in a checkpoint of training without gradwire. Raises what `Wire.load` raises.
    """
    if wire.load(Path(folder) / name) is not None:
        return True
    warnings.warn(
        f"{folder} holds no state of gradwire: training goes on, and the gradient that was unsent is lost",
        GradwireWarning,
        stacklevel=2,
    )
    return False
