"""The names and addresses of this node, as the kernel knows them: netdevice(7), proc_net(5)."""

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFCONF = 0x8912
_REQUEST_BYTES = 40  # of an ifreq: name, then a sockaddr_in, whose address comes after family and port
_ADDRESS = slice(20, 24)
_MOST = 4096  # addresses
_CONF = struct.Struct("iP")


def node_names() -> set[str]:
    """Return the node's host name and the addresses of its interfaces, without loopback."""
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = {*_addresses4(), *_addresses6()}
    return {str(address) for address in found if not address.is_loopback} | ({os.uname().nodename} - {"localhost"})


def _addresses4() -> Iterator[ipaddress.IPv4Address]:
    buffer = bytearray(_MOST * _REQUEST_BYTES)
    pinned = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, _CONF.pack(len(buffer), ctypes.addressof(pinned)))
        size = _CONF.unpack(answer)[0]
        for at in range(0, size, _REQUEST_BYTES):
            yield ipaddress.IPv4Address(bytes(buffer[at : at + _REQUEST_BYTES][_ADDRESS]))


def _addresses6() -> Iterator[ipaddress.IPv6Address]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            yield ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))
