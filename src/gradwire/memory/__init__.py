"""What becomes of the unsent part of a gradient: late, not lost."""

from gradwire.memory.base import UNSENT, Gradients, Memory, Planes
from gradwire.memory.forgetful import Forgetful
from gradwire.memory.low_pass import LowPass
from gradwire.memory.momentum import MOMENTUM, MomentumCorrection
from gradwire.memory.residual import Residual
from gradwire.memory.signum import Signum

__all__ = [
    "MOMENTUM",
    "UNSENT",
    "Forgetful",
    "Gradients",
    "LowPass",
    "Memory",
    "MomentumCorrection",
    "Planes",
    "Residual",
    "Signum",
]
