"""The sockets of a process, queried directly: of what kind they are, and in what state.

A socket is queried through a copy of its descriptor (pidfd_getfd(2)), which changes nothing for its owner.
"""

import array
import contextlib
import errno
import fcntl
import os
import re
import select
import socket
import struct
import termios
from collections.abc import Iterator
from typing import NamedTuple

from ocihook.linux.descriptors import copy_descriptor

_SO_DOMAIN, _SO_PROTOCOL = 39, 38
_TCP_INFO = struct.Struct("<B23xI")  # linux/tcp.h: state, and unacked, which of a listener is its queue
_TCP_CLOSE, _TCP_LISTEN = 7, 10
_SOCKET = re.compile(r"socket:\[([0-9]+)\]")
_IP = (socket.AF_INET, socket.AF_INET6)

_UDP_CORK = 1  # linux/udp.h
_TCP_ULP = 31  # linux/tcp.h; of its name at most 16 bytes
_SO_ZEROCOPY = 60  # asm-generic/socket.h
_SIOCGSKNS = 0x894C  # linux/sockios.h
_BOUND_ANYWHERE = (15, 19)  # linux/in.h: IP_FREEBIND, IP_TRANSPARENT
_MPTCP = 262  # IPPROTO_MPTCP; Python has it from 3.12 on


class Socket(NamedTuple):
    """One open socket."""

    pid: int
    inode: int
    family: int
    kind: int  # SOCK_STREAM, ...
    protocol: int
    is_listening: bool
    is_connected: bool  # TCP: neither closed nor listening
    waiting: int  # connections that nobody has accepted yet
    address: str  # where it is bound, on an IP or at a path; "" if nowhere
    is_corked: bool = False  # UDP: it delays what is sent
    is_bound_anywhere: bool = False  # IPv4: to an address that need not be there (IP_FREEBIND, IP_TRANSPARENT)
    broadcasts_to: str = ""  # UDP over IPv4: where it is connected, if it may send to all (SO_BROADCAST)
    network: str = ""  # its network namespace, as /proc names it; "" if it is unknown
    unread_bytes: int = 0  # of datagrams and packets: in the first one
    upper: str = ""  # TCP: the protocol of the kernel above it (TCP_ULP), as "tls"
    is_zero_copy: bool = False  # TCP: it may send without a copy (SO_ZEROCOPY)
    has_urgent: bool = False  # TCP: an urgent byte is unread
    has_urgent_inline: bool = False  # TCP: among other data (SO_OOBINLINE)
    before_urgent_bytes: int = 0  # TCP: unread data before the urgent byte, if that is not inline

    @property
    def is_multipath(self) -> bool:
        """Return whether it is of multipath TCP: a raw socket may have the same protocol."""
        return self.family in _IP and self.kind == socket.SOCK_STREAM and self.protocol == _MPTCP


def sockets(pid: int) -> Iterator[Socket]:
    """Yield the sockets of a process; none when it is gone, or may not be accessed."""
    for inode, sock in copies(pid):
        with contextlib.suppress(OSError):
            yield describe(pid, inode, sock)


def copies(pid: int) -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and copy of each socket of a process, which is open until the next one; as `sockets`."""
    for _, inode, sock in numbered_copies(pid):
        yield inode, sock


def numbered_copies(pid: int) -> Iterator[tuple[int, int, socket.socket]]:
    """Yield descriptor, inode and copy of each socket of a process; as `copies`."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                found = _copy(pid, pidfd, int(fd))
                if found is not None:
                    with found[1]:
                        yield int(fd), *found
        finally:
            os.close(pidfd)


def copy_socket(pid: int, fd: int) -> socket.socket | None:
    """Return a copy of a socket of a process, which the caller closes; None if there is none."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            found = _copy(pid, pidfd, fd)
            return found[1] if found else None
        finally:
            os.close(pidfd)
    return None


def _copy(pid: int, pidfd: int, fd: int) -> tuple[int, socket.socket] | None:
    with contextlib.suppress(OSError):  # it was closed meanwhile
        match = _SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{fd}"))
        if match:
            return int(match[1]), socket.socket(fileno=copy_descriptor(pidfd, fd))
    return None


def is_tcp(sock: socket.socket) -> bool:
    """Return whether it is a TCP socket: a raw socket may have the same protocol, and has no such options."""
    kind, protocol = (sock.getsockopt(socket.SOL_SOCKET, name) for name in (socket.SO_TYPE, _SO_PROTOCOL))
    return sock.family in _IP and kind == socket.SOCK_STREAM and protocol == socket.IPPROTO_TCP


def describe(pid: int, inode: int, sock: socket.socket) -> Socket:
    """Return what a copy of a process's socket shows.

    Raises:
        OSError: if it does not show that.
    """
    family = sock.getsockopt(socket.SOL_SOCKET, _SO_DOMAIN)
    kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    protocol = sock.getsockopt(socket.SOL_SOCKET, _SO_PROTOCOL)
    is_listening, is_connected, waiting, address = False, False, 0, ""
    if family in _IP:
        address = str(sock.getsockname()[0])
    elif family == socket.AF_UNIX and str(name := sock.getsockname()).startswith("/"):
        address, is_listening = str(name), bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    if is_tcp(sock):
        state, waiting = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        is_listening = state == _TCP_LISTEN
        is_connected = state not in (_TCP_LISTEN, _TCP_CLOSE)
    waiting = waiting if is_listening else 0
    is_udp = family in _IP and kind == socket.SOCK_DGRAM and protocol == socket.IPPROTO_UDP
    is_corked = is_udp and sock.getsockopt(socket.IPPROTO_UDP, _UDP_CORK) != 0
    is_anywhere = family == socket.AF_INET and any(sock.getsockopt(socket.IPPROTO_IP, o) for o in _BOUND_ANYWHERE)
    to = _broadcasts_to(sock) if is_udp and family == socket.AF_INET else ""
    seen = Socket(
        pid, inode, family, kind, protocol, is_listening, is_connected, waiting, address, is_corked, is_anywhere, to
    )
    seen = seen._replace(network=_network_of(sock))
    if is_connected:
        seen = seen._replace(upper=_upper(sock), is_zero_copy=_is_zero_copy(sock))
        return _with_urgent(seen, sock) if _has_urgent(sock) else seen
    return seen._replace(unread_bytes=_unread(sock)) if _holds_packets(seen) else seen


def _network_of(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):  # an older kernel
        fd = fcntl.ioctl(sock, _SIOCGSKNS)
        try:
            return f"net:[{os.fstat(fd).st_ino}]"
        finally:
            os.close(fd)
    return ""


def _upper(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):  # an older kernel
        return sock.getsockopt(socket.IPPROTO_TCP, _TCP_ULP, 16).rstrip(b"\0").decode(errors="replace")
    return ""


def _is_zero_copy(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):  # an older kernel
        return sock.getsockopt(socket.SOL_SOCKET, _SO_ZEROCOPY) != 0
    return False


def _has_urgent(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLPRI)
    return any(events & select.POLLPRI for _, events in poll.poll(0))


def _with_urgent(seen: Socket, sock: socket.socket) -> Socket:
    is_inline = sock.getsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE) != 0
    return seen._replace(
        has_urgent=True, has_urgent_inline=is_inline, before_urgent_bytes=0 if is_inline else _unread(sock)
    )


def _holds_packets(seen: Socket) -> bool:
    """Return whether it queues datagrams or packets that CRIU leaves out; those of Unix sockets it dumps."""
    return (seen.family in _IP and seen.protocol not in (socket.IPPROTO_TCP, _MPTCP)) or seen.family == socket.AF_PACKET


def _unread(sock: socket.socket) -> int:
    unread = array.array("i", [0])
    with contextlib.suppress(OSError):  # of a kind that does not know it
        fcntl.ioctl(sock, termios.FIONREAD, unread)
    return unread[0]


def _broadcasts_to(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):  # it is not connected
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST):
            return str(sock.getpeername()[0])
    return ""


def hides_socket_options() -> bool:
    """Return whether this kernel lacks the options that CRIU before 4.2 reads of Internet sockets (criu#2705)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED)
        except OSError as error:
            return error.errno == errno.EOPNOTSUPP
    return False
