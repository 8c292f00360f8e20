"""Where gradients, memory and codecs are, by what bytes travel, and how one gets to the other."""

from gradwire.placement.base import Placement, Post, Resolve, host, staged, stream
from gradwire.placement.device import Accelerator, Device, HostDevice, device_at, fetch
from gradwire.placement.staging import StagedComm, StreamTransfer
from gradwire.placement.streaming import Inline, LaterComm, StreamComm, ThroughComm
from gradwire.placement.transfer import (
    BufferTransfer,
    CopyTransfer,
    InPlaceTransfer,
    TransferredBuffer,
    Waited,
)

__all__ = [
    "Accelerator",
    "BufferTransfer",
    "CopyTransfer",
    "Device",
    "HostDevice",
    "InPlaceTransfer",
    "Inline",
    "LaterComm",
    "Placement",
    "Post",
    "Resolve",
    "StagedComm",
    "StreamComm",
    "StreamTransfer",
    "ThroughComm",
    "TransferredBuffer",
    "Waited",
    "device_at",
    "fetch",
    "host",
    "staged",
    "stream",
]
