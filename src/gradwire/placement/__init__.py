"""Placement: where gradients, memory and codecs are, which transport carries bytes, and the copies
between them.
"""

from gradwire.placement.base import CommitTime, Placement, Post, host, staged, stream
from gradwire.placement.comms import StagedComm, StreamComm, by_the_host, through_a_device
from gradwire.placement.device import Accelerator, Device, HostDevice, device_at, fetch
from gradwire.placement.inline import Inline
from gradwire.placement.transfer import (
    BufferTransfer,
    CopyTransfer,
    StreamTransfer,
    TransferredBuffer,
    Waited,
)

__all__ = [
    "Accelerator",
    "BufferTransfer",
    "CommitTime",
    "CopyTransfer",
    "Device",
    "HostDevice",
    "Inline",
    "Placement",
    "Post",
    "StagedComm",
    "StreamComm",
    "StreamTransfer",
    "TransferredBuffer",
    "Waited",
    "by_the_host",
    "device_at",
    "fetch",
    "host",
    "staged",
    "stream",
    "through_a_device",
]
