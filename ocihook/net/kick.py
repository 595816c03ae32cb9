"""Wakes senders that wait for a timer, once their packets may pass again.

What a hold keeps from leaving is unsent to TCP: the kernel probes for it, at intervals that double (0.2 s and so on; of
a restored socket 1 s and so on). Any call that pushes sends it at once. To take a cork off a socket that has none is
such a call, and changes nothing else.

What had left, and nobody has acknowledged, waits for a retransmission timer that doubles, too. An ICMP "host
unreachable" about the oldest unacknowledged byte reverts one step of that (RFC 6069; the kernel's tcp_ld_RTO_revert),
and retransmits at once if the timer would have expired by then. It is made here, about a connection of this very
namespace, and sent to the connection's own address: nothing leaves the node. The number of that byte is known from
CRIU's image; asking the kernel for it would take TCP_REPAIR, which costs a running process its connection if it
receives at that moment.
"""

import array
import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from ocihook.linux.procfs import descendants
from ocihook.net.lost_options import tcp_sockets
from ocihook.net.namespace import NetNamespace
from ocihook.net.policy import IPAddress
from ocihook.net.stall import Place, place_of

_IP_RECVERR, _IPV6_RECVERR = 11, 25  # linux/in.h, linux/in6.h
_UNSENT = 0x894B  # SIOCOUTQNSD of linux/sockios.h: bytes that have never left
_STEPS = 16  # more than any timer backs off: from 1 s to 120 s it takes 7
_ICMP, _HOST_UNREACHABLE = 3, 1
_ICMPV6, _NO_ROUTE = 1, 0
_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_IPV6 = struct.Struct("!IHBB16s16s")
_TCP = struct.Struct("!HHI")  # ports and sequence number: what an ICMP message has of the packet at least
_PACKET_BYTES = 1400  # that the packet is said to have had
_DO_NOT_FRAGMENT = 0x4000


class Sender(NamedTuple):
    """A connection that may wait."""

    local: IPAddress
    local_port: int
    remote: IPAddress
    remote_port: int
    unacknowledged: int  # sequence number of the oldest unacknowledged byte

    @property
    def place(self) -> Place:
        """Where the connection is."""
        return Place(str(self.local), self.local_port, str(self.remote), self.remote_port)


def wake(namespace: NetNamespace, senders: Iterable[Sender], init_pid: int) -> None:
    """Wake senders; it does not disturb those that do not wait, nor those whose owner would read of the message.

    Args:
        namespace: the container's.
        senders: those that had anything to send in CRIU's image.
        init_pid: the container's first process; 0 if it has ended.

    Raises:
        OSError: if the namespace cannot be entered.
    """
    found, pids = list(senders), descendants(init_pid) if init_pid else ()
    if found:
        push(pids)
        told = _told_of_errors(pids)
        namespace.run(lambda: _kick([sender for sender in found if sender.place not in told]))


def push(pids: Iterable[int]) -> None:
    """Have the kernel send at once what processes have given to TCP and has never left."""
    unsent = array.array("i", [0])
    for _, sock in tcp_sockets(pids):
        with contextlib.suppress(OSError):  # it listens, or has just been closed
            fcntl.ioctl(sock, _UNSENT, unsent)
            if unsent[0] and not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)


def _told_of_errors(pids: Iterable[int]) -> set[Place]:
    """Return the connections whose owner is told of what ICMP says, with an error in place of data (IP_RECVERR)."""
    found = set()
    for _, sock in tcp_sockets(pids):
        options = [(socket.IPPROTO_IP, _IP_RECVERR)]
        options += [(socket.IPPROTO_IPV6, _IPV6_RECVERR)] if sock.family == socket.AF_INET6 else []
        if any(sock.getsockopt(level, option) for level, option in options):
            found.add(place_of(sock))
    return found


def _kick(senders: Sequence[Sender]) -> None:
    for version, family, protocol in ((4, socket.AF_INET, socket.IPPROTO_ICMP), (6, socket.AF_INET6, 58)):
        alike = [sender for sender in senders if sender.local.version == version]
        if alike:
            with socket.socket(family, socket.SOCK_RAW, protocol) as raw:
                for sender in alike:
                    packet = unreachable(sender)
                    with contextlib.suppress(OSError):  # an address that has gone again: nobody waits there
                        for _ in range(_STEPS):
                            raw.sendto(packet, (str(sender.local), 0))


def unreachable(sender: Sender) -> bytes:
    """Return the ICMP message about a packet of a connection."""
    start = _TCP.pack(sender.local_port, sender.remote_port, sender.unacknowledged)
    if isinstance(sender.local, IPv6Address):
        header = _IPV6.pack(6 << 28, _PACKET_BYTES, socket.IPPROTO_TCP, 64, sender.local.packed, sender.remote.packed)
        return struct.pack("!BBHI", _ICMPV6, _NO_ROUTE, 0, 0) + header + start  # the kernel puts its checksum in
    assert isinstance(sender.local, IPv4Address)
    header = _IPV4.pack(
        0x45,
        0,
        _PACKET_BYTES,
        1,
        _DO_NOT_FRAGMENT,
        64,
        socket.IPPROTO_TCP,
        0,
        sender.local.packed,
        sender.remote.packed,
    )
    message = struct.pack("!BBHI", _ICMP, _HOST_UNREACHABLE, 0, 0) + header + start
    return message[:2] + struct.pack("!H", _checksum(message)) + message[4:]


def _checksum(message: bytes) -> int:
    """Return the checksum of RFC 1071."""
    total: int = sum(struct.unpack(f"!{len(message) // 2}H", message))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
