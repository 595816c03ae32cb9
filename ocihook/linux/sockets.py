"""The sockets of a process, asked of the kernel itself: their kind, their state, and who is at the other end.

A socket is asked through a copy of its descriptor (pidfd_getfd(2)), which changes nothing for its owner. Who is at the
other end of a Unix socket only sock_diag(7) tells, in the network namespace that the socket is in.
"""

import contextlib
import ctypes
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ocihook.linux.descriptors import copy_descriptor

_TIMEOUT_S = 10.0  # for the kernel to tell
_CLONE_NEWNET = 1 << 30
_SO_DOMAIN, _SO_PROTOCOL = 39, 38
_TCP_INFO = struct.Struct("<B23xI")  # linux/tcp.h: state, and unacked, which of a listener is its queue
_TCP_CLOSE, _TCP_LISTEN = 7, 10
_SOCKET = re.compile(r"socket:\[([0-9]+)\]")
_IP = (socket.AF_INET, socket.AF_INET6)

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_UNIX_REQUEST = struct.Struct("=BBHIIIII")  # unix_diag_req (linux/unix_diag.h)
_UNIX_ANSWER = struct.Struct("=BBBBIII")  # unix_diag_msg
_SHOW_PEER, _SHOW_CLIENTS, _SHOW_QUEUE = 4, 8, 16
_PEER, _CLIENTS, _QUEUE = 2, 3, 4  # attributes of an answer
_UNIX_LISTEN = 10
_UDP_CORK = 1  # linux/udp.h
_libc = ctypes.CDLL(None, use_errno=True)


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
    address: str  # where it is bound; "" if nowhere, or not on an IP
    is_corked: bool = False  # UDP: it holds back what is sent


class UnixSocket(NamedTuple):
    """What the kernel knows of a Unix socket."""

    peer: int  # inode at the other end; 0 if there is none
    clients: tuple[int, ...]  # of a listener: who is connected and not accepted yet, 0 for one that has closed
    unread_bytes: int  # that it has sent and nobody has read


def sockets(pid: int) -> Iterator[Socket]:
    """Yield the sockets of a process; none when it is gone, or may not be looked into."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                match = _SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{fd}"))
                if match:
                    with socket.socket(fileno=copy_descriptor(pidfd, int(fd))) as sock:
                        yield _describe(pid, int(match[1]), sock)
    except FileNotFoundError:
        return
    finally:
        os.close(pidfd)


def _describe(pid: int, inode: int, sock: socket.socket) -> Socket:
    family = sock.getsockopt(socket.SOL_SOCKET, _SO_DOMAIN)
    kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    protocol = sock.getsockopt(socket.SOL_SOCKET, _SO_PROTOCOL)
    is_listening, is_connected, waiting, address = False, False, 0, ""
    if family in _IP:
        address = str(sock.getsockname()[0])
    if family in _IP and protocol == socket.IPPROTO_TCP:
        state, waiting = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        is_listening = state == _TCP_LISTEN
        is_connected = state not in (_TCP_LISTEN, _TCP_CLOSE)
    waiting = waiting if is_listening else 0
    is_udp = family in _IP and protocol == socket.IPPROTO_UDP
    is_corked = is_udp and sock.getsockopt(socket.IPPROTO_UDP, _UDP_CORK) != 0
    return Socket(pid, inode, family, kind, protocol, is_listening, is_connected, waiting, address, is_corked)


def unix_sockets(pid: int) -> dict[int, UnixSocket]:
    """Return the Unix sockets in the network namespace of a process by their inodes.

    Raises:
        OSError: if that namespace cannot be entered, or the kernel does not tell.
    """
    with _diag_socket(pid) as diag:
        diag.settimeout(_TIMEOUT_S)
        shown = _SHOW_PEER | _SHOW_CLIENTS | _SHOW_QUEUE
        request = _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, shown, 0, 0)
        size = _HEADER.size + len(request)
        diag.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0) + request)
        found: dict[int, UnixSocket] = {}
        while True:
            data = diag.recv(1 << 16)  # waits: as long as the socket's own time-out
            position = 0
            while position + _HEADER.size <= len(data):
                size, kind, *_ = _HEADER.unpack_from(data, position)
                if kind == _NLMSG_DONE:
                    return found
                if kind == _NLMSG_ERROR:
                    raise OSError(-struct.unpack_from("=i", data, position + _HEADER.size)[0], "sock_diag")
                inode, described = _unix_socket(data[position + _HEADER.size : position + size])
                found[inode] = described
                position += (size + 3) & ~3


def _unix_socket(answer: bytes) -> tuple[int, UnixSocket]:
    _, _, state, _, inode, *_ = _UNIX_ANSWER.unpack_from(answer)
    numbers: dict[int, tuple[int, ...]] = {}
    position = _UNIX_ANSWER.size
    while position + 4 <= len(answer):
        size, kind = struct.unpack_from("=HH", answer, position)
        if kind in (_PEER, _CLIENTS, _QUEUE):
            numbers[kind] = struct.unpack_from(f"={(size - 4) // 4}I", answer, position + 4)
        position += max(4, (size + 3) & ~3)
    _, unread_bytes = numbers.get(_QUEUE, (0, 0))
    is_listening = state == _UNIX_LISTEN  # whose second number is the length of its queue, at most
    return inode, UnixSocket(
        numbers.get(_PEER, (0,))[0], numbers.get(_CLIENTS, ()), 0 if is_listening else unread_bytes
    )


def _diag_socket(pid: int) -> socket.socket:
    """Return a sock_diag socket in the network namespace of a process; a thread goes there for it, and ends."""
    made: list[socket.socket | OSError] = []
    namespace = Path(f"/proc/{pid}/ns/net")

    def make() -> None:
        try:
            if os.readlink(namespace) != os.readlink("/proc/thread-self/ns/net"):
                fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if _libc.setns(fd, _CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                finally:
                    os.close(fd)
            made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()  # waits: for two system calls
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
