"""Where gradients, memory and codecs are, by what bytes travel, and how one gets to the other."""

from gradwire.placement.base import Placement, Post, Resolve, host
from gradwire.placement.bringing import Bringing, Brought, Copies, InPlace
from gradwire.placement.device import Accelerator, Device, HostDevice, device_at

__all__ = [
    "Accelerator",
    "Bringing",
    "Brought",
    "Copies",
    "Device",
    "HostDevice",
    "InPlace",
    "Placement",
    "Post",
    "Resolve",
    "device_at",
    "host",
]
