"""What CRIU silently loses of sockets (criu/sk-tcp.c, criu/sockets.c): read before a dump, put back after it.

A socket is reached through a copy of its descriptor, which changes nothing for its owner.
"""

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ocihook.linux.sockets import copies, is_tcp

_USER_TIMEOUT, _NOTSENT_LOWAT = 18, 25  # linux/tcp.h
_NAME_BYTES = 16  # TCP_CA_NAME_MAX
_IP_OPTIONS_BYTES = 40  # MAX_IPOPTLEN


class TcpOptions(NamedTuple):
    """Options of one TCP socket."""

    user_timeout_ms: int = 0  # TCP_USER_TIMEOUT; 0: the system's
    notsent_lowat_bytes: int = 0  # TCP_NOTSENT_LOWAT; 0: the system's; negative from 2 GiB on
    congestion: str = ""  # TCP_CONGESTION; "": not known


def tcp_sockets(pids: Iterable[int]) -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and copy of each TCP socket of processes, once each; a copy is open until the next one.

    A process that is gone, or may not be looked into, has none.
    """
    seen: set[int] = set()
    for pid in pids:
        for inode, sock in copies(pid):
            if inode not in seen:
                seen.add(inode)
                if is_tcp(sock):
                    yield inode, sock


def keep(sock: socket.socket) -> socket.socket:
    """Return another copy, which is open until it is closed.

    Not by `dup`, which sets the copy's timeout: that takes O_NONBLOCK from the socket, also for its owner.
    """
    return socket.socket(fileno=os.dup(sock.fileno()))


def read_options(sock: socket.socket) -> TcpOptions:
    """Return the options of a TCP socket.

    Raises:
        OSError: if the kernel refuses.
    """
    congestion = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    return TcpOptions(
        sock.getsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT),
        sock.getsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT),
        congestion.rstrip(b"\0").decode(errors="replace"),
    )


def put_back(sock: socket.socket, wanted: TcpOptions) -> list[str]:
    """Give a TCP socket its options; return those that it cannot have here, with their values."""
    failed = []
    has = read_options(sock)
    settings: tuple[tuple[str, int, int | str, int | str], ...] = (
        ("TCP_USER_TIMEOUT", _USER_TIMEOUT, wanted.user_timeout_ms, has.user_timeout_ms),
        ("TCP_NOTSENT_LOWAT", _NOTSENT_LOWAT, wanted.notsent_lowat_bytes, has.notsent_lowat_bytes),
        ("TCP_CONGESTION", socket.TCP_CONGESTION, wanted.congestion or has.congestion, has.congestion),
    )
    for name, option, value, now in settings:
        try:
            if value != now:
                raw = value.encode() if isinstance(value, str) else value
                sock.setsockopt(socket.IPPROTO_TCP, option, raw)
        except (OSError, OverflowError):
            failed.append(f"{name} {value}")
    return failed


def use_whole_segments(sock: socket.socket) -> None:
    """Have a connection that CRIU has restored send segments as large as the path takes, as before the dump.

    CRIU connects a socket first and sets the peer's segment size (TCPOPT_MAXSEG) after that, so the kernel goes on
    with the size for a peer that has announced none: 536 bytes, of IPv6 1220. Segments that small also fill a receiver
    beyond its window; Linux from 6.17 on then takes no acknowledgement from the sender, and both stand still. The
    kernel computes the size again when IP options are set, here to what they are.
    """
    with contextlib.suppress(OSError):  # the connection is over
        options = sock.getsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, _IP_OPTIONS_BYTES)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, options)
