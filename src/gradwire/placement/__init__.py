"""Where gradients, memory and codecs are, by what bytes travel, and how one gets to the other."""

from gradwire.placement.base import Placement, Post, Resolve, host, staged, stream
from gradwire.placement.device import Accelerator, Device, HostDevice, device_at, fetch
from gradwire.placement.staging import OnStream, StagedComm
from gradwire.placement.streaming import Inline, LaterComm, StreamComm, ThroughComm
from gradwire.placement.transfer import Bringing, Brought, Copies, InPlace

__all__ = [
    "Accelerator",
    "Bringing",
    "Brought",
    "Copies",
    "Device",
    "HostDevice",
    "InPlace",
    "Inline",
    "LaterComm",
    "OnStream",
    "Placement",
    "Post",
    "Resolve",
    "StagedComm",
    "StreamComm",
    "ThroughComm",
    "device_at",
    "fetch",
    "host",
    "staged",
    "stream",
]
