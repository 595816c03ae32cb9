"""Multicast groups that sockets have joined, which CRIU silently loses: read before a dump, joined again after it.

The kernel lists the groups of each interface, and says of a socket whether it is in one of them, and from which sources
it takes datagrams (MCAST_MSFILTER of RFC 3678).
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import printable
from ocihook.linux.procfs import pid_below
from ocihook.linux.sockets import copy_socket, numbered_copies

_JOIN_GROUP, _FILTER = 42, 48  # MCAST_JOIN_GROUP, MCAST_MSFILTER of linux/in.h
_INCLUDE, _EXCLUDE = 1, 0  # MCAST_INCLUDE, MCAST_EXCLUDE: these sources only, all but these
_LEVELS = {socket.AF_INET: socket.IPPROTO_IP, socket.AF_INET6: socket.IPPROTO_IPV6}
_ADDRESS_BYTES = 128  # struct sockaddr_storage
_PREFIX = struct.Struct("=I4x")  # of struct group_req and group_filter: the index of an interface
_COUNTS = struct.Struct("=II")  # of group_filter, after the group: mode, number of sources
_MAX_SOURCES = 512  # of a membership: the kernel's own limits are 10 and 64 (igmp_max_msf, mld_max_msf)

IPAddress = IPv4Address | IPv6Address

_libc = ctypes.CDLL(None, use_errno=True)


class Membership(NamedTuple):
    """A socket's membership of one group on one interface."""

    pid: str  # of a process that has the socket, as the container's first process sees it
    fd: int
    interface: str
    group: str
    mode: int = _EXCLUDE
    sources: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it as people write it."""
        return f"{self.group} on {self.interface}"


class _Group(NamedTuple):
    """A group that is joined on an interface, by any socket or by the kernel itself."""

    address: IPAddress
    device: int  # the index of the interface
    interface: str


def read_memberships(pids: Sequence[int]) -> list[Membership]:
    """Return the memberships of the sockets of a container's processes, the first of which comes first."""
    groups = list(_groups(pids[0]))
    found: list[Membership] = []
    seen: set[int] = set()
    for pid in pids if groups else ():
        for fd, inode, sock in numbered_copies(pid):
            if inode not in seen and sock.family in _LEVELS:
                seen.add(inode)
                found += _of_socket(sock, groups, pid_below(pids[0], pid), fd)
    return found


def _of_socket(sock: socket.socket, groups: Iterable[_Group], pid: str, fd: int) -> Iterator[Membership]:
    for address, device, interface in groups:
        if address.version == 4 or sock.family == socket.AF_INET6:
            with contextlib.suppress(OSError):  # EADDRNOTAVAIL: this socket is not a member
                mode, sources = _read_filter(sock, address, device)
                yield Membership(pid, fd, interface, str(address), mode, sources)


def _groups(pid: int) -> Iterator[_Group]:
    """Yield the groups of each interface in the network of a process; names may have any characters."""
    device, name = 0, ""
    for line in _lines(pid, "igmp")[1:]:
        words = line.split()
        if not line.startswith(b"\t"):
            device, name = int(words[0]), _name(words[1].rstrip(b":"))
        else:  # in the byte order of this machine
            yield _Group(IPv4Address(int(words[0], 16).to_bytes(4, sys.byteorder)), device, name)
    for line in _lines(pid, "igmp6"):
        number, interface, group, *_ = line.split()
        yield _Group(IPv6Address(bytes.fromhex(group.decode())), int(number), _name(interface))


def _name(device: bytes) -> str:
    return printable(device.decode("utf-8", "surrogateescape"))


def _lines(pid: int, name: str) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/net/{name}").read_bytes().split(b"\n")[:-1]
    return []


def _read_filter(sock: socket.socket, group: IPAddress, device: int) -> tuple[int, tuple[str, ...]]:
    """Return from where a socket takes datagrams of a group: a mode and sources.

    Raises:
        OSError: EADDRNOTAVAIL if it is no member of that group on that interface.
    """
    head = _PREFIX.pack(device) + _pack(group) + _COUNTS.pack(0, _MAX_SOURCES)
    buffer = ctypes.create_string_buffer(head, len(head) + _MAX_SOURCES * _ADDRESS_BYTES)
    length = ctypes.c_uint32(len(buffer))
    if _libc.getsockopt(sock.fileno(), _level(group), _FILTER, buffer, ctypes.byref(length)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mode, count = _COUNTS.unpack_from(buffer, len(head) - _COUNTS.size)
    places = (len(head) + number * _ADDRESS_BYTES for number in range(min(count, _MAX_SOURCES)))
    return mode, tuple(str(_unpack(buffer.raw[place : place + _ADDRESS_BYTES])) for place in places)


def rejoin(pids: Sequence[int], wanted: Iterable[Membership]) -> list[str]:
    """Join the groups again that sockets of restored processes had joined; return what cannot be joined here."""
    members = list(wanted)
    here = {pid_below(pids[0], pid): pid for pid in pids} if members else {}
    return [f"membership of {one}" for one in members if not _rejoin(here.get(one.pid, 0), one)]


def _rejoin(pid: int, wanted: Membership) -> bool:
    """Return whether a socket is in a group again."""
    sock = copy_socket(pid, wanted.fd) if pid else None
    if sock is None:
        return False
    group, sources = ip_address(wanted.group), [ip_address(source) for source in wanted.sources]
    with sock, contextlib.suppress(OSError, StopIteration):  # the latter: there is no such interface
        device = next(one.device for one in _groups(pid) if one.interface == wanted.interface)
        place = _PREFIX.pack(device) + _pack(group)
        try:
            sock.setsockopt(_level(group), _JOIN_GROUP, place)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # it is a member already
                raise
        if wanted.mode == _INCLUDE or sources:
            packed = b"".join(map(_pack, sources))
            sock.setsockopt(_level(group), _FILTER, place + _COUNTS.pack(wanted.mode, len(sources)) + packed)
        return True
    return False


def _level(group: IPAddress) -> int:
    return socket.IPPROTO_IP if group.version == 4 else socket.IPPROTO_IPV6


def _pack(address: IPAddress) -> bytes:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return (struct.pack("=HH", family, 0) + (b"" if address.version == 4 else bytes(4)) + address.packed).ljust(
        128, b"\0"
    )


def _unpack(raw: bytes) -> IPAddress:
    (family,) = struct.unpack_from("=H", raw)
    return IPv4Address(raw[4:8]) if family == socket.AF_INET else IPv6Address(raw[8:24])
