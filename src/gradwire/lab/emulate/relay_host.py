"""Starting, steering and ending the relay process; opening the TUN device it works on."""

import fcntl
import os
import struct
import subprocess
import sys
from pathlib import Path

from gradwire.lab.emulate import relay
from gradwire.lab.emulate.tools import batch

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TUNSETVNETHDRSZ = 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM, _OFFLOAD_TSO4 = 0x01, 0x02
_QUEUE_PACKETS = 20000  # what the kernel keeps while the relay waits for a processor


class Relay:
    """Must be made by a thread inside of the switch's namespace, where the device will live."""

    interface = "delay0"

    def __init__(self, mtu_bytes: int) -> None:
        tun = self._open()
        control, self._control = os.pipe()
        try:
            batch("ip", [f"link set {self.interface} mtu {mtu_bytes} txqueuelen {_QUEUE_PACKETS} up"])
            # Isolated and by path: importing the package would cost a second and bring in torch.
            argv = [sys.executable, "-I", "-S", str(Path(relay.__file__)), str(tun), str(control)]
            self._process = subprocess.Popen(argv, pass_fds=(tun, control), stdin=subprocess.DEVNULL)
        except BaseException:
            os.close(self._control)
            raise
        finally:
            os.close(tun)
            os.close(control)

    def _open(self) -> int:
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(
                f"a delay needs the kernel's netem or /dev/net/tun; this machine has neither ({error}): "
                "leave the delay out, or use mode backend"
            ) from error
        try:
            flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", self.interface.encode(), flags))
            fcntl.ioctl(tun, _TUNSETVNETHDRSZ, struct.pack("i", 10))
            fcntl.ioctl(tun, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | _OFFLOAD_TSO4)
        except BaseException:
            os.close(tun)
            raise
        return tun

    def set_delay(self, delay_s: float) -> None:
        """Packets that arrive from now on are held for `delay_s`."""
        os.write(self._control, struct.pack("d", delay_s))

    def close(self) -> None:
        """End the relay; packets it holds are lost."""
        os.close(self._control)
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
