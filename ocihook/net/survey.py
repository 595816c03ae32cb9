"""What a container has of sockets, in the network namespace that it is in: read once, for a dump or for doctor."""

import socket
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_interface

from ocihook.linux.sockets import sockets
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import InetSocket, Link, inet_sockets, links

IPAddress = IPv4Address | IPv6Address

_IP = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class Survey:
    """A container's sockets of the IP families."""

    namespace: NetNamespace
    inodes: Collection[int]  # of all that its processes have
    has_mptcp: bool

    @classmethod
    def of(cls, pids: Collection[int]) -> "Survey | None":
        """Look at a container; None if it has no such socket, or is gone.

        Args:
            pids: of its processes, the first of them first: its network is what counts.
        """
        found = {s.inode: s for pid in pids for s in sockets(pid) if s.family in _IP}
        if not found:
            return None
        try:
            namespace = NetNamespace.of(next(iter(pids)))
        except FileNotFoundError:
            return None
        return cls(namespace, found.keys(), any(sock.is_multipath for sock in found.values()))

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
