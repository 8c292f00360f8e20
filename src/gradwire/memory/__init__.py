"""What becomes of the unsent part of a gradient: late, not lost."""

from gradwire.memory.base import MOMENTUM, UNSENT, Gradients, Memory, Planes
from gradwire.memory.forgetful import Forgetful
from gradwire.memory.low_pass import LowPass
from gradwire.memory.residual import Residual

__all__ = [
    "MOMENTUM",
    "UNSENT",
    "Forgetful",
    "Gradients",
    "LowPass",
    "Memory",
    "Planes",
    "Residual",
]
