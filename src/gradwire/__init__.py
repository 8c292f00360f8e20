"""Near-linear data-parallel PyTorch training on networks that are too slow for it.

One line on top of `DistributedDataParallel`::

    wire = gradwire.attach(ddp, optimizer)
"""

from gradwire import recipes
from gradwire.ddp.attach import attach
from gradwire.ddp.explore import Trial, explore
from gradwire.ddp.layout import by_size
from gradwire.ddp.report import Report
from gradwire.ddp.wire import Wire
from gradwire.errors import GradwireError, PeerFailed, RanksDisagree, TransportError, WireError
from gradwire.recipes import Recipe, recipe
from gradwire.version import __version__

__all__ = [
    "GradwireError",
    "PeerFailed",
    "RanksDisagree",
    "Recipe",
    "Report",
    "TransportError",
    "Trial",
    "Wire",
    "WireError",
    "__version__",
    "attach",
    "by_size",
    "explore",
    "recipe",
    "recipes",
]
