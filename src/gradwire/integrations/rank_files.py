"""A file per rank in the folder of a checkpoint: no state travels, and every rank takes up its own.

For frameworks whose checkpoints are folders. `Wire.save` and `Wire.load` do the work, in a folder of their
own inside.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from gradwire.errors import GradwireWarning
from gradwire.wire import Wire

NAME = "gradwire"


def save(wire: Wire, folder: str | os.PathLike[str], name: str = NAME) -> None:
    """Write every rank's state to `folder`/`name`. A collective; raises what `Wire.save` raises."""
    wire.save(Path(folder) / name)


def load(wire: Wire, folder: str | os.PathLike[str], name: str = NAME) -> bool:
    """Take up what `save` has written. A collective; says whether there was anything.

    Warns where there is nothing, as in a checkpoint of training without gradwire. Raises what `Wire.load`
    raises.
    """
    if wire.load(Path(folder) / name) is not None:
        return True
    warnings.warn(
        f"{folder} holds no state of gradwire: training goes on, and the gradient that was unsent is lost",
        GradwireWarning,
        stacklevel=2,
    )
    return False
