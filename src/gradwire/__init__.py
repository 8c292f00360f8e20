"""Near-linear data-parallel PyTorch training on networks that are too slow for it.

One line on top of `DistributedDataParallel`::

    wire = gradwire.attach(ddp, optimizer)
"""

from gradwire.version import __version__

__all__ = ["__version__"]
