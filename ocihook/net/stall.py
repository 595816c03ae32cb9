"""Measures how long connections stall once traffic passes again: until each peer has acknowledged something."""

import contextlib
import socket
import struct
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from ipaddress import ip_address
from typing import NamedTuple, Self

from ocihook.criu.socket_images import plain_address
from ocihook.linux.patience import Patience
from ocihook.net.lost_options import keep, tcp_sockets
from ocihook.session.journal import Journal

_LIMIT_S = 0.3  # that CRIU is kept waiting to see whether connections resume
_BYTES_ACKED = struct.Struct("=120xQ")  # tcpi_bytes_acked in struct tcp_info (linux/tcp.h)
_FIRST = 1  # that the kernel counts from, anew for a socket that CRIU makes
_ESTABLISHED = 1


class Place(NamedTuple):
    """Where a TCP socket is: addresses and ports, "" and 0 where it has no other end."""

    local: str
    local_port: int
    remote: str
    remote_port: int


def place_of(sock: socket.socket) -> Place:
    """Return where a socket is; IPv4 addresses as such, also where a socket of IPv6 has them."""
    local, port, *_ = sock.getsockname()
    remote, remote_port = "", 0
    with contextlib.suppress(OSError):  # it has no other end
        remote, remote_port, *_ = sock.getpeername()
    return Place(_plain(local), port, remote and _plain(remote), remote_port)


def _plain(address: str) -> str:
    return str(plain_address(ip_address(address.partition("%")[0]).packed))


class Watch(AbstractContextManager["Watch"]):
    """Connections that have something to send, and how much their peers have acknowledged before."""

    def __init__(self, pids: Iterable[int], places: Collection[Place], *, is_restored: bool = False) -> None:
        """Take copies of those sockets of processes that are at these places; if restored, from their beginning on."""
        with ExitStack() as stack:
            found = [stack.enter_context(keep(sock)) for _, sock in tcp_sockets(pids) if place_of(sock) in places]
            self._connections = [(sock, _FIRST if is_restored else _acknowledged(sock)) for sock in found]
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def go_on(self, limit_s: float) -> bool:
        """Return whether there are any, and all of them go on within so long."""
        patience = Patience(timeout_s=limit_s)
        return bool(self._connections) and patience.until(
            lambda: all(_goes_on(sock, before) for sock, before in self._connections)
        )

    def record(self, journal: Journal, released_at: float) -> None:
        """Record as a phase how long they have stalled since traffic passes (seconds since 1970)."""
        if not self._connections:
            return
        is_going = self.go_on(_LIMIT_S)
        journal.add_phase("connections stalled" if is_going else "connections stalled (at least)", released_at)


def _acknowledged(sock: socket.socket) -> int:
    info = _info(sock)
    return _BYTES_ACKED.unpack(info)[0] if len(info) == _BYTES_ACKED.size else 0


def _info(sock: socket.socket) -> bytes:
    with contextlib.suppress(OSError):  # the connection is over
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    return b""


def _goes_on(sock: socket.socket, before: int) -> bool:
    """Return whether the peer has acknowledged more, or the connection is over."""
    info = _info(sock)
    return len(info) != _BYTES_ACKED.size or info[0] != _ESTABLISHED or _BYTES_ACKED.unpack(info)[0] > before
