"""The address at which other members reach this machine: never a host name, which may mean a slow card."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from urllib.parse import urlsplit

_GET_ADDRESS = 0x8915
"""Linux's request for the IPv4 address of an interface."""
_ADDRESSES_6, _LINK = "/proc/net/if_inet6", "20"
"""Linux's list of IPv6 addresses, and the scope there of those that need the interface's name beside."""


def own_address(given: str) -> str:
    """IP address of this machine for `given`: an address, a host name, or a network interface.

    Raises `ValueError` if it is not of this machine.

    >>> own_address("127.0.0.1"), own_address("lo")
    ('127.0.0.1', '127.0.0.1')
    """
    if not isinstance(given, str):
        raise ValueError(f"address={given!r} is not a word: an address, a host name or an interface")
    found = given
    if given in {name for _number, name in socket.if_nameindex()}:
        found = _of_interface(given)
    try:
        found = str(socket.getaddrinfo(found, None, type=socket.SOCK_STREAM)[0][4][0])
        with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET) as tried:
            tried.bind((found, 0))
    except OSError as error:
        raise ValueError(
            f"address={given!r} is not an address or interface of this machine: {error}"
        ) from error
    return found


def address_towards(host: str | None) -> str:
    """Address of this machine from which packets to `host` are sent; by default, to the launcher's host.

    Raises `ValueError` if no address of this machine leads there.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    host = host or os.environ.get("MASTER_ADDR") or "127.0.0.1"
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as towards:
            towards.connect(found[4])  # sends nothing
            here: str = towards.getsockname()[0]
            return here
    except OSError as error:
        raise ValueError(f"no address of this machine leads to {host!r} ({error}): pass address=") from error


def host_of(url: str) -> str:
    """The host of a URL such as "http://lighthouse:29510". Raises `ValueError` if it has none.

    >>> host_of("http://lighthouse:29510"), host_of("lighthouse:29510")
    ('lighthouse', 'lighthouse')
    """
    parts = urlsplit(url if "//" in url else f"//{url}")
    if not parts.hostname:
        raise ValueError(f"{url!r} is no address of a lighthouse, such as 'http://lighthouse:29510'")
    return parts.hostname


def is_loopback(address: str) -> bool:
    """True if only this machine can reach the address."""
    return ipaddress.ip_address(address).is_loopback


def _of_interface(name: str) -> str:
    """Its IPv4 address; the first IPv6 one that other machines reach, if it has no other."""
    import fcntl  # not everywhere

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            packed = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(packed[20:24])
    except OSError:
        with open(_ADDRESSES_6) as listed:
            for line in listed:
                digits, _index, _prefix, scope, _flags, of = line.split()
                if of == name and scope != _LINK:
                    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        raise
