"""A switch and one namespace per node, joined by cables (veth pairs) that are shaped at both ends.

The switch routes between point-to-point cables instead of bridging: a packet that arrives from a rank can
then be sent through the delaying relay by a routing rule, while processes run, without touching the cables.
"""

import fcntl
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from gradwire_lab.emulate import relay
from gradwire_lab.emulate.kernel import ToolFailed, batch, bind_mount, in_netns, new_netns
from gradwire_lab.emulate.link import Counters, EmulatedLink

LARGEST_WORLD = 250


def address(node: int) -> str:
    """The node's address inside of the emulated network."""
    return f"10.119.0.{node + 1}"


def show_rank_names() -> None:
    """Put `rank0`, `rank1`, … into this sandbox's view of /etc/hosts.

    Without it every connection asks a name server that the ranks cannot reach, and torch warns. The mount
    namespace is private, so the machine's own file stays as it is.
    """
    own = Path("/etc/hosts")
    with tempfile.NamedTemporaryFile("w", prefix="gradwire-hosts-", encoding="utf-8") as file:
        file.write(own.read_text(encoding="utf-8").rstrip("\n") + "\n")
        for rank in range(LARGEST_WORLD):  # torch listens on IPv6 sockets and asks for mapped addresses
            file.write(f"{address(rank)} rank{rank}\n::ffff:{address(rank)} rank{rank}\n")
        file.flush()
        Path(file.name).chmod(0o644)
        bind_mount(file.name, str(own))  # the mount outlives the name in the temporary folder


_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TUNSETVNETHDRSZ = 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM, _OFFLOAD_TSO4 = 0x01, 0x02
_QUEUE_PACKETS = 20000  # what the kernel keeps while the relay waits for a processor


class Relay:
    """The process of `relay.py` and the TUN device that it works on.

    Must be made by a thread inside of the switch's namespace, where the device will live.
    """

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


INTERFACE = "eth0"
MTU_BYTES = 9000  # jumbo frames: TCP, IP and Ethernet headers stay below 1 % of the payload
_GATEWAY = "10.119.255.254"
_BURST_S = 1e-3
_TABLE = 119
_MOST_AT_ONCE = 65536  # the kernel's own limit
_MOST_WINDOW = 2**30 - 1  # twice that must be an int of the kernel's


def burst_bytes(rate_bit_per_s: float) -> int:
    """Bytes that tbf may send at once: a millisecond's worth, but at least a frame, because tbf drops larger
    ones.

    A sender that has rested gets this burst for free, which favours small senders, so it is as small as
    possible.
    """
    return int(max(rate_bit_per_s / 8 * _BURST_S, 1.1 * MTU_BYTES))


def pieces_bytes(rate_bit_per_s: float | None) -> int:
    """Largest piece of a stream that TCP hands to an interface, to be cut into frames later.

    A piece within tbf's burst passes as a whole, as through a network card, and wakes the receiver once. tbf
    cuts up larger pieces itself; if the burst is a single frame, there is nothing to gain. The rate includes
    the headers of all frames; the interface counts those of a piece once.
    """
    at_once = _MOST_AT_ONCE if rate_bit_per_s is None else burst_bytes(rate_bit_per_s)
    return _MOST_AT_ONCE if at_once < 2 * MTU_BYTES else min(at_once, _MOST_AT_ONCE)


class Topology:
    """Owns the namespaces (as descriptors) and the relay; `close` makes all of it vanish."""

    def __init__(self, nodes: int, link: EmulatedLink, servers: int = 0) -> None:
        """Lay cables to `nodes`, of which the last `servers` have no limit of rate."""
        self.switch = new_netns()
        self.nodes = [new_netns() for _ in range(nodes)]
        self._limited = nodes - servers
        self._relay: Relay | None = None
        self._netem: bool | None = None  # None: not tried yet
        try:
            self._wire()
            self._link = EmulatedLink()
            self.reshape(link)
        except BaseException:
            self.close()
            raise

    def _wire(self) -> None:
        holder = os.getpid()
        switch = ["link set lo up"]
        for node, netns in enumerate(self.nodes):
            port = f"port{node}"
            switch += [
                f"link add {port} mtu {MTU_BYTES} type veth "
                f"peer name {INTERFACE} mtu {MTU_BYTES} netns /proc/{holder}/fd/{netns}",
                f"address add {_GATEWAY}/32 dev {port}",
                f"link set {port} up",
                f"route add {address(node)}/32 dev {port}",
            ]
        in_netns(self.switch, lambda: self._configure_switch(switch))
        for node, netns in enumerate(self.nodes):
            lines = [
                "link set lo up",
                f"address add {address(node)}/32 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                f"route add {_GATEWAY}/32 dev {INTERFACE}",
                f"route add default via {_GATEWAY} dev {INTERFACE}",
            ]
            in_netns(netns, lambda lines=lines: batch("ip", lines))  # type: ignore[misc]

    @staticmethod
    def _configure_switch(lines: list[str]) -> None:
        ipv4 = Path("/proc/sys/net/ipv4")
        (ipv4 / "ip_forward").write_text("1")
        # A packet that comes back from the relay has the address of a sender behind another interface.
        for scope in ("all", "default"):
            (ipv4 / "conf" / scope / "rp_filter").write_text("0")
        batch("ip", lines)

    def reshape(self, link: EmulatedLink) -> None:
        """Give every cable a new rate and delay while traffic flows; lifting a rate drops what is queued."""
        window = _window_bytes(link)
        queue_bytes = window * max(len(self.nodes) - 1, 1)
        for netns in self.nodes:
            in_netns(netns, lambda: _allow_windows(window))
        for netns in self.nodes[: self._limited]:
            in_netns(netns, lambda: self._shape([INTERFACE], link, queue_bytes))
        ports = [f"port{node}" for node in range(self._limited)]
        in_netns(self.switch, lambda: self._shape(ports, link, queue_bytes))
        self._set_delay(link)
        self._link = link

    def _shape(self, interfaces: list[str], link: EmulatedLink, queue_bytes: int) -> None:
        rate, old = link.rate_bit_per_s, self._link.rate_bit_per_s
        at_once = pieces_bytes(rate)
        batch("ip", [f"link set {interface} gso_max_size {at_once}" for interface in interfaces])
        lines = []
        for interface in interfaces:
            if rate is not None:
                lines.append(
                    f"qdisc replace dev {interface} root handle 1: tbf rate {rate:.0f}bit "
                    f"burst {burst_bytes(rate)} limit {queue_bytes}"
                )
            elif old is not None:
                lines.append(f"qdisc del dev {interface} root")
        if lines:
            batch("tc", lines)

    def _set_delay(self, link: EmulatedLink) -> None:
        delay_s = link.delay_s
        if self._netem is None and delay_s > 0:
            self._netem = self._try_netem(link)
        elif self._netem:
            self._apply_netem(link)
        if self._netem is False:
            self._through_relay(delay_s)

    def _try_netem(self, link: EmulatedLink) -> bool:
        try:
            self._apply_netem(link)
        except ToolFailed:  # the kernel was built without it
            return False
        return True

    def _apply_netem(self, link: EmulatedLink) -> None:
        delay_us = round(link.delay_s * 1e6)
        for node, netns in enumerate(self.nodes):
            parent = "root" if link.rate_bit_per_s is None or node >= self._limited else "parent 1:1"
            line = f"qdisc replace dev {INTERFACE} {parent} handle 10: netem delay {delay_us}us limit 100000"
            in_netns(netns, lambda line=line: batch("tc", [line]))  # type: ignore[misc]

    def _through_relay(self, delay_s: float) -> None:
        if self._relay is None:
            self._relay = in_netns(self.switch, lambda: Relay(MTU_BYTES))
            rules = [f"rule add iif port{node} lookup {_TABLE}" for node in range(len(self.nodes))]
            lines = [f"route add default dev {self._relay.interface} table {_TABLE}", *rules]
            in_netns(self.switch, lambda: batch("ip", lines))
        self._relay.set_delay(delay_s)

    def counters(self) -> list[Counters]:
        """The counters of every node's interface."""
        return [in_netns(netns, lambda: read_counters(INTERFACE)) for netns in self.nodes]

    def close(self) -> None:
        """Let go of the namespaces; they vanish once no process lives in them."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        for netns in (*self.nodes, self.switch):
            os.close(netns)
        self.nodes = []


def _window_bytes(link: EmulatedLink) -> int:
    """TCP's largest window: four bandwidth-delay products, so that the rate can be reached."""
    product = (link.rate_bit_per_s or 1e9) / 8 * 2 * link.delay_s
    return int(min(max(4 * 1024**2, 4 * product), _MOST_WINDOW))


def _allow_windows(window_bytes: int) -> None:
    # Per namespace since Linux 4.15. Receive buffers count bookkeeping too, hence twice the window.
    ipv4 = Path("/proc/sys/net/ipv4")
    (ipv4 / "tcp_rmem").write_text(f"4096 131072 {2 * window_bytes}")
    (ipv4 / "tcp_wmem").write_text(f"4096 131072 {2 * window_bytes}")


def read_counters(interface: str) -> Counters:
    """Bytes counted at an interface of the calling thread's namespace, since the interface exists."""
    with open("/proc/thread-self/net/dev", encoding="ascii") as table:
        for line in table:
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                fields = numbers.split()
                return Counters(int(fields[0]), int(fields[8]), int(fields[9]))
    raise ValueError(f"interface={interface!r}: no such interface in this network namespace")
