"""What a container has of sockets, in the network namespace that it is in: read once, for a dump or for doctor."""

import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_interface

from ocihook.linux.sockets import Socket, sockets
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import InetSocket, Link, inet_sockets, links

IPAddress = IPv4Address | IPv6Address

_IP = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class Survey:
    """A container's sockets of the IP families."""

    namespace: NetNamespace
    inodes: Collection[int]  # of all that its processes have

    @classmethod
    def of(cls, pids: Collection[int]) -> "Survey | None":
        """Look at a container; None if it has no such socket, or is gone.

        Args:
            pids: of its processes, the first of them first: its network is what counts.
        """
        return cls.of_sockets(next(iter(pids)), (sock for pid in pids for sock in sockets(pid)))

    @classmethod
    def of_sockets(cls, init_pid: int, found: Iterable[Socket]) -> "Survey | None":
        """Return the survey of a container whose sockets have been read; as `of`."""
        inodes = frozenset(sock.inode for sock in found if sock.family in _IP)
        if not inodes:
            return None
        try:
            return cls(NetNamespace.of(init_pid), inodes)
        except FileNotFoundError:
            return None

    @cached_property
    def _in_network(self) -> list[InetSocket]:
        return inet_sockets(self.namespace)

    @cached_property
    def sockets(self) -> list[InetSocket]:
        """The container's sockets, without those that other containers of its pod have."""
        return [sock for sock in self._in_network if sock.inode in self.inodes]

    @property
    def of_nobody(self) -> list[InetSocket]:
        """The TCP sockets of its network that no process has: not accepted yet, or closed."""
        return [sock for sock in self._in_network if sock.inode == 0 and sock.protocol == socket.IPPROTO_TCP]

    @cached_property
    def connections(self) -> list[InetSocket]:
        """Its TCP connections."""
        return [sock for sock in self.sockets if sock.is_connection]

    @cached_property
    def links(self) -> list[Link]:
        """The interfaces of its network."""
        return links(self.namespace)

    @property
    def own(self) -> frozenset[IPAddress]:
        """The addresses of its network."""
        return frozenset(ip_interface(text).ip for link in self.links for text in link.addresses)
